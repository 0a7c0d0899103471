"""Calls whose message never ends, by hand: gRPC's clients send whole ones."""

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

FRAME_BYTES = 16384
WINDOW = 65535
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
INITIAL_WINDOW_SIZE = 4
QUIET_S = 0.5


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _head(method: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field) for field in fields.items())


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.changed = asyncio.Event()
        self.initial = WINDOW
        self.room = WINDOW
        self.room_of: dict[int, int] = defaultdict(int)
        """By stream, without what each begins with."""
        self._reader = reader
        self._writer = writer

    async def listen(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == WINDOW_UPDATE and stream:
                self.room_of[stream] += int.from_bytes(payload, "big")
            elif kind == WINDOW_UPDATE:
                self.room += int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags & 1:
                for key, value in struct.iter_unpack(">HI", payload):
                    self.initial = value if key == INITIAL_WINDOW_SIZE else self.initial
                self._writer.write(_frame(SETTINGS, 1, 0))
            elif kind == PING and not flags & 1:
                self._writer.write(_frame(PING, 1, 0, payload))
            self.changed.set()

    async def send(self, num_calls: int, method: str, size: int) -> int:
        """As much as is taken, until nothing more is. Returns the bytes."""
        prefix = b"\0" + struct.pack(">I", size)
        left = {2 * index + 1: size - 10 for index in range(num_calls)}
        sent = dict.fromkeys(left, len(prefix))
        self.room -= num_calls * len(prefix)
        for stream in left:
            self._writer.write(_frame(HEADERS, 4, stream, _head(method)) + _frame(DATA, 0, stream, prefix))
        while any(left.values()):
            self.changed.clear()
            before = sum(left.values())
            for stream in left:
                room = min(self.initial + self.room_of[stream] - sent[stream], self.room, left[stream], FRAME_BYTES)
                if room > 0:
                    self._writer.write(_frame(DATA, 0, stream, bytes(room)))
                    left[stream] -= room
                    sent[stream] += room
                    self.room -= room
            await self._writer.drain()
            if sum(left.values()) == before:
                try:
                    await asyncio.wait_for(self.changed.wait(), QUIET_S)
                except TimeoutError:
                    break
        return sum(sent.values())


@asynccontextmanager
async def unfinished_calls(address: str, num_calls: int, method: str, size: int) -> AsyncIterator[int]:
    """Open meanwhile, from 127.0.0.2, each with a message of `size` bytes without its last. Gives the bytes taken."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))
    connection = _Connection(reader, writer)
    listening = asyncio.create_task(connection.listen())
    try:
        yield await connection.send(num_calls, method, size)
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            await listening
        writer.close()
