"""A piece of network between two parts that a test can cut, heal, slow down or reset. It knows bytes only.

A cut loses nothing that TCP would not lose: bytes wait on either side and go on when it is healed, as when packets are
dropped for a while; whoever cannot wait so long has closed its end by then. `reset` is what a firewall or a dead host
that came back does: every connection ends at once with RST.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 64
"""That are on their way in one direction; the sender waits then, as behind a full window."""


class TcpRelay:
    """Use as `async with`. Listens on a free port, or on the one given, and passes on to `upstream` ("host:port")."""

    def __init__(self, upstream: str, port: int = 0) -> None:
        self.upstream = upstream
        self.address = ""
        self.delay_s = 0.0
        """That every byte is under way, in each direction: half a round trip."""
        self.bandwidth: float | None = None
        """Bytes per second of each connection and direction; None = as fast as they come."""
        self.num_connections = 0
        """Made so far."""
        self._port = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "TcpRelay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # of tasks that had not begun
            _abort(writer)
        await asyncio.sleep(0)  # their sockets are closed by then

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._passing.clear()

    def heal(self) -> None:
        self._refusing = False
        self._passing.set()

    def reset(self, refuse: bool = False) -> None:
        """Ends every connection. `refuse`: new ones too, until `heal`."""
        self._refusing = refuse
        for writer in list(self._writers):
            _abort(writer)

    @property
    def num_open(self) -> int:
        """Connections that are passed on now."""
        return len(self._tasks)

    @contextlib.contextmanager
    def being_cut(self) -> Iterator[None]:
        self.cut()
        try:
            yield
        finally:
            self.heal()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._pass_on(reader, writer)
        except OSError:
            pass  # one end broke: nothing is left to tell anybody
        finally:
            self._writers.discard(writer)
            _abort(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until both sides have ended, or one of them with an error."""
        await self._passing.wait()
        if self._refusing:
            return
        host, _, port = self.upstream.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        self._writers.add(up_writer)
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, up_writer), (up_reader, writer))]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers.discard(up_writer)
            _abort(up_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, to its end. What was under way when the other side broke is lost."""
        under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(MAX_CHUNKS)
        now = asyncio.get_running_loop().time

        async def read() -> None:
            sent_s = 0.0
            data: bytes | None = b"-"
            while data:
                try:
                    data = await reader.read(CHUNK_BYTES)
                except OSError:
                    data = None
                sent_s = max(sent_s, now())
                if data and self.bandwidth:
                    sent_s += len(data) / self.bandwidth
                await under_way.put((sent_s + self.delay_s, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due_s, data = await under_way.get()
                if (wait_s := due_s - now()) > 0:
                    await asyncio.sleep(wait_s)
                await self._passing.wait()
                if data is None:
                    raise ConnectionResetError
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    """RST, unless the other end has closed."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
