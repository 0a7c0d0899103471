"""The client for code without an event loop."""

import gc
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.client import Client, Completion
from outrider.wire import errors
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, eventually, hanging


def test_sync_client_does_all_the_async_one_does(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        assert client.generate("hello").text == TEXT
        assert [model.id for model in client.models()] == ["pair", "guessed", "alone"]
        with client.stream("hello") as stream:
            assert "".join(round_.text_delta for round_ in stream) == TEXT
        with pytest.raises(errors.InvalidRequest):
            client.generate("hello", n=0)


def test_sync_client_is_shared_by_threads(gateway: ScriptedGateway) -> None:
    def work(index: int) -> Completion:
        return client.generate(f"prompt {index}", n=2)

    with Client(gateway.address) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(32)))
    assert {answer.choices[1].text for answer in answers} == {TEXT}
    assert {request.prompt for request in gateway.requests} == {f"prompt {index}" for index in range(32)}


def test_sync_stream_left_early_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    with Client(gateway.address) as client:
        with client.stream("hello") as stream:
            assert next(stream).num_drafted == 3
        assert eventually(gateway.cancelled)
        assert list(stream) == []


def test_sync_client_closes_twice_and_then_raises(gateway: ScriptedGateway) -> None:
    client = Client(gateway.address)
    stream = client.stream("hello")
    next(stream)
    client.close()
    client.close()
    stream.close()
    with pytest.raises(errors.OutriderError, match="client is closed"):
        client.generate("hello")
    with pytest.raises(errors.OutriderError, match="client is closed"):
        next(stream)


def test_closing_from_another_thread_ends_a_waiting_call(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    client = Client(gateway.address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hello")
        assert eventually(gateway.asked)
        client.close()
        with pytest.raises(errors.OutriderError, match="closed while this call was in progress"):
            waiting.result(5)
    assert eventually(gateway.cancelled)


def test_ctrl_c_in_a_waiting_call_cancels_it_and_leaves_the_client_usable(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        assert eventually(gateway.asked)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with Client(gateway.address) as client, ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.generate("hello")
        interrupted.result(5)
        assert eventually(gateway.cancelled)
        assert client.generate("hello").text == TEXT


def test_ctrl_c_while_a_call_begins_cancels_it(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.scripts.append(hanging())
    with Client(gateway.address) as client:
        loop = client._thread._loop
        begin = loop.call_soon_threadsafe

        def begin_and_interrupt(*args: Any) -> None:
            monkeypatch.undo()
            begin(*args)
            assert eventually(gateway.asked)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "call_soon_threadsafe", begin_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.generate("hello")
        assert eventually(gateway.cancelled)
        assert client.generate("hello").text == TEXT


def test_a_dropped_sync_client_ends_its_thread(gateway: ScriptedGateway) -> None:
    client = Client(gateway.address)
    client.models()
    thread, gone = client._thread._thread, weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_an_unclosed_sync_client_leaves_quietly_at_exit(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    script = (
        "from outrider.client import Client\n"
        f"client = Client({gateway.address!r})\n"
        "stream = client.stream('hello')\n"
        "print(next(stream).text_delta)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " the quick red\n", "")
    assert eventually(gateway.cancelled)
