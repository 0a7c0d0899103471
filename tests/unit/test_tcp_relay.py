"""The network that failure tests cut: what it holds back arrives, what it resets does not, what it delays is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.tcp_relay import TcpRelay


@pytest.fixture
async def relay() -> AsyncIterator[TcpRelay]:
    """To a server that says everything again."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with TcpRelay(f"{host}:{port}") as made:
            yield made


async def connected(relay: TcpRelay) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = relay.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), 5)


async def test_bytes_pass_in_both_directions_and_an_end_does(relay: TcpRelay) -> None:
    reader, writer = await connected(relay)
    big = bytes(range(256)) * 4000
    assert await said(reader, writer, big) == big
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_cut_holds_bytes_and_new_connections_back_until_it_is_healed(relay: TcpRelay) -> None:
    reader, writer = await connected(relay)
    assert await said(reader, writer, b"before") == b"before"
    with relay.being_cut():
        other_reader, other_writer = await connected(relay)
        for each in (writer, other_writer):
            each.write(b"during")
        await asyncio.sleep(0.2)
        assert not reader._buffer and not other_reader._buffer  # type: ignore[attr-defined]
    for each in (reader, other_reader):
        assert await asyncio.wait_for(each.readexactly(6), 5) == b"during"
    for each in (writer, other_writer):
        each.close()


async def test_a_reset_ends_every_connection_and_refuses_others_until_it_is_healed(relay: TcpRelay) -> None:
    reader, writer = await connected(relay)
    assert await said(reader, writer, b"before") == b"before"
    relay.reset(refuse=True)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 5)
    refused, refused_writer = await connected(relay)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(refused.read(), 5)
    relay.heal()
    reader, again = await connected(relay)
    assert await said(reader, again, b"after") == b"after"
    for each in (writer, refused_writer, again):
        each.close()


async def test_every_byte_is_late_by_the_delay_and_none_is_lost(relay: TcpRelay) -> None:
    reader, writer = await connected(relay)
    await said(reader, writer, b"before")
    relay.delay_s = 0.1
    began_s = time.monotonic()
    assert await said(reader, writer, b"there and back") == b"there and back"
    assert 0.2 <= time.monotonic() - began_s < 2.0
    writer.close()
