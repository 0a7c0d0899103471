"""The connection below a client: processes that fork, pings, and one of the caller's own."""

import asyncio
import subprocess
import sys
from typing import Any

import grpc.aio
import pytest

from outrider.client import AsyncClient, Client, GrpcTransport
from outrider.wire import errors
from tests.unit.outrider.client.connected import FakeTransport
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, rounds


async def test_an_injected_transport_replaces_the_network() -> None:
    transport = FakeTransport(list(rounds()))
    async with AsyncClient("not an address", transport=transport, timeout_s=None) as client:
        assert (await client.generate("hello")).text == TEXT
        assert await client.models() == ()
    assert transport.timeouts == [None, None]
    assert transport.num_closes == 1


def test_an_async_client_belongs_to_one_loop(gateway: ScriptedGateway) -> None:
    transport = GrpcTransport(gateway.address)
    client = AsyncClient(transport=transport)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.models())
        with pytest.raises(errors.OutriderError, match="one per loop"):
            second.run(client.models())
        first.run(client.aclose())


def test_the_first_call_of_a_process_forked_from_a_connected_client_raises(gateway: ScriptedGateway) -> None:
    script = (
        "import asyncio, os\n"
        "from outrider.client import AsyncClient, Client, OutriderError\n"
        "def forked(when, ask):\n"
        "    if not (child := os.fork()):\n"
        "        try:\n"
        "            ask()\n"
        "            said = 'answered'\n"
        "        except OutriderError as error:\n"
        "            said = error.message.partition(',')[0]\n"
        "        print(when, said, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "def new():\n"
        f"    with Client({gateway.address!r}, timeout_s=20) as client:\n"
        "        client.models()\n"
        "async def asynchronous():\n"
        f"    client = AsyncClient({gateway.address!r})\n"
        "    await client.models()\n"
        "    return client\n"
        f"client = Client({gateway.address!r})\n"
        "forked('unused:', new)\n"
        "client.models()\n"
        "forked('connected:', new)\n"
        "forked('old:', client.models)\n"
        "forked('asynchronous:', lambda: asyncio.run(asynchronous()))\n"
        "client.close()\n"
        "forked('closed:', new)\n"
        "left = asyncio.run(asynchronous())\n"
        "forked('its loop has ended:', new)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    refused = "this process was forked from one in which a client was connected"
    said = {
        "unused": "answered",
        "connected": refused,
        "old": refused,
        "asynchronous": refused,
        "closed": "answered",
        "its loop has ended": refused,
    }
    assert dict(line.split(": ") for line in done.stdout.splitlines()) == said, done.stderr


def test_a_client_pings_no_more_often_than_grpcs_servers_allow_and_only_during_calls(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default they end a connection with more than a ping in 300 s without data, or with any without a call."""
    options: dict[str, int] = {}
    make = grpc.aio.insecure_channel

    def noted(address: str, options_of_channel: list[tuple[str, int]]) -> Any:
        options.update(options_of_channel)
        return make(address, options=options_of_channel)

    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda address, options: noted(address, options))
    with Client(gateway.address) as client:
        client.models()
    assert options["grpc.keepalive_time_ms"] > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    with Client(gateway.address, ping_interval_s=2.5) as client:
        client.models()
    assert options["grpc.keepalive_time_ms"] == 2500
    with pytest.raises(errors.ConfigError, match=r"ping_interval_s is 0\.5, must be from 1 to 86400"):
        Client(gateway.address, ping_interval_s=0.5)


def test_a_client_made_before_a_fork_is_refused_behind_it() -> None:
    script = (
        "import os\n"
        "from outrider.client import Client, OutriderError\n"
        "client = Client('127.0.0.1:1')\n"
        "stream = client.stream('hello')\n"
        "if (child := os.fork()):\n"
        "    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n"
        "    client.generate('hello')\n"
        "except OutriderError as error:\n"
        "    print(error.message)\n"
        "with stream:\n"
        "    pass\n"
        "client.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = "this client was made before this process was forked; make a new one here\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
