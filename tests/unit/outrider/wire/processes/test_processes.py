"""Children: whose modules they import, and how a second signal reaches one that is being waited for."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.wire.processes.processes import Child
from outrider.wire.processes.stop_flag import StopFlag, stop_signals

HUNG_AFTER_S = 30.0
_STUBBORN = """
import signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
print('{"event": "ready"}', flush=True)
while len(got) < int(sys.argv[1]):
    time.sleep(0.01)
"""

_WAITS_FOR_SIGNALS = """
import os, sys
from outrider.wire.processes.stop_flag import StopFlag
for number in range(int(sys.argv[1])):
    stop = StopFlag()
    with stop.installed():
        os.write(1, b".")
        if number % 2:
            stop.wait()
        while not stop.wait(0):
            pass
"""
"""Takes as many signals: blocked for every other one, and in a tight loop of looks at the flag for the rest."""

_LOADS_FOR_EVER = """
import os, sys, time
from outrider.wire.settings.config import DraftConfig
from outrider.wire.processes.worker_main import run_worker
class Loading:
    def __del__(self):
        os.write(1, b".")
        time.sleep(60)
run_worker("draft", DraftConfig, lambda config: Loading() and None, ["--model", "m", "--port", "0"])
"""
"""A signal's handler runs in `__del__`, which swallows what it raises."""

_BESIDE_CALLS = """
import sys, threading
import outrider.cli
import grpc
from concurrent.futures import ThreadPoolExecutor
from outrider.wire.processes.processes import Child
server = grpc.server(ThreadPoolExecutor(1))
channel = grpc.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()
def call():
    while True:
        try:
            channel.unary_unary("/no/service")(b"", timeout=1)
        except grpc.RpcError:
            pass
threading.Thread(target=call, daemon=True).start()
for _ in range(20):
    child = Child("one", [sys.executable, "-c", ""])
    assert child.process.wait(30) == 0, child.last_lines(5)
    child.close()
"""


def test_a_child_that_begins_beside_calls_runs_none_of_grpcs_handlers() -> None:
    """They aborted 1 of 40 and left a line in the log of every other."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", _BESIDE_CALLS], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_of_our_name_where_the_user_is_hides_none_of_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "__init__.py").write_text("raise RuntimeError('of the user')")
    monkeypatch.chdir(tmp_path)
    child = Child("one", [sys.executable, "-m", "outrider.wire.processes.processes"], env=dict(os.environ))
    code = child.process.wait(30)
    lines = child.last_lines(5)
    child.close()
    assert (code, lines) == (0, [])


@pytest.mark.parametrize(("signals", "code"), [(2, 0), (3, -signal.SIGKILL)])
def test_a_second_signal_shortens_a_childs_grace(signals: int, code: int) -> None:
    flag = StopFlag()
    child = Child("one", [sys.executable, "-c", _STUBBORN, str(signals)])
    child.events.get(timeout=30)
    flag._on_signal(signal.SIGINT, None)
    child.ask_to_stop()
    time.sleep(0.2)
    flag._on_signal(signal.SIGINT, None)
    began = time.monotonic()
    child.stop(20.0, lambda: flag.hurry, 0.5)
    child.close()
    assert time.monotonic() - began < 5
    assert child.returncode == code


def test_of_2000_signals_at_random_moments_none_leaves_a_process_waiting() -> None:
    """With a flag whose handler takes a lock most such processes hang before the hundredth."""
    moments = random.Random(0)
    command = [sys.executable, "-c", _WAITS_FOR_SIGNALS, "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        try:
            for number in range(2000):
                readable, _, _ = select.select([waiting.stdout], [], [], HUNG_AFTER_S)
                assert readable, f"it hangs after {number} signals"
                assert os.read(waiting.stdout.fileno(), 1) == b"."
                spin_until_s = time.perf_counter() + moments.uniform(0.0, 1e-4)
                while time.perf_counter() < spin_until_s:
                    pass
                waiting.send_signal(moments.choice([signal.SIGINT, signal.SIGTERM]))
            assert waiting.wait(HUNG_AFTER_S) == 0
        finally:
            waiting.kill()


def test_what_ends_a_wait() -> None:
    stop = StopFlag()
    assert not stop.wait(0.01)
    threading.Timer(0.01, stop.notify).start()
    assert not stop.wait(HUNG_AFTER_S) and not stop.is_set()
    threading.Timer(0.01, stop.set).start()
    others = [threading.Thread(target=stop.wait) for _ in range(3)]
    for other in others:
        other.start()
    while not stop.wait(HUNG_AFTER_S):
        pass
    for other in others:
        other.join(HUNG_AFTER_S)
        assert not other.is_alive(), "the flag is for all who wait"
    assert stop.wait() and not stop.hurry


def test_a_hangup_that_nohup_had_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_wait_ends_by_a_signal_after_an_event_loop_has_taken_signals_for_itself() -> None:
    stop = StopFlag()
    with stop.installed():

        async def watch_signals() -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)

        asyncio.run(watch_signals())
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGHUP)).start()
        while not stop.wait():
            pass
        assert not stop.hurry
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait() and stop.hurry


def test_the_end_of_a_child_ends_a_wait_and_all_that_it_said_is_there() -> None:
    stop = StopFlag()
    say = "import json; [print(json.dumps({'event': str(number)})) for number in range(100)]"
    child = Child("one", [sys.executable, "-c", say], notify=stop.notify)
    while not child.has_ended():
        stop.wait()
    assert [child.events.get_nowait()["event"] for _ in range(100)] == [str(number) for number in range(100)]
    child.close()


def test_ctrl_c_while_the_command_line_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "outrider", "up"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_signal_ends_a_worker_that_still_loads_wherever_its_main_thread_is() -> None:
    loading = [sys.executable, "-c", _LOADS_FOR_EVER]
    with subprocess.Popen(loading, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"."
        process.terminate()
        assert process.wait(HUNG_AFTER_S) == 0 and process.stderr.read() == b""
