"""A TCP balancer as clusters have them: it knows connections only, and who is ready by GET /readyz."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

PROBE_INTERVAL_S = 0.2
CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class Backend:
    """A gateway: where its ports are, and whether new connections go to it."""

    http: str
    grpc: str
    is_ready: bool = False


class Balancer:
    """Use as `async with`. A new connection goes to the next ready gateway, and to another where that one refuses it;
    a connection that stands is never touched.
    """

    def __init__(self) -> None:
        self.backends: list[Backend] = []
        self.addresses: dict[str, str] = {}
        """Where clients connect, by protocol: http and grpc."""
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Balancer":
        self._servers = []
        for protocol in ("http", "grpc"):
            server = await asyncio.start_server(self._accepting(protocol), "127.0.0.1", 0)
            self._servers.append(server)
            self.addresses[protocol] = "{}:{}".format(*server.sockets[0].getsockname())
        self._probing = asyncio.create_task(self._probe())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._probing.cancel()
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._probing, *self._tasks, return_exceptions=True)

    async def add(self, backend: Backend) -> None:
        """Return once new connections go to it."""
        self.backends.append(backend)
        while not backend.is_ready:  # noqa: ASYNC110  # the probe tells nobody
            await asyncio.sleep(PROBE_INTERVAL_S / 4)

    async def _probe(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=1.0) as http:
            while True:
                for backend in list(self.backends):
                    try:
                        answer = await http.get(f"http://{backend.http}/readyz", headers={"connection": "close"})
                        backend.is_ready = answer.status_code == 200
                    except httpx.HTTPError:
                        backend.is_ready = False
                await asyncio.sleep(PROBE_INTERVAL_S)

    def _accepting(self, protocol: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):  # at the end, which asyncio's streams would log
                upstream = await self._connect(protocol)
                if upstream is not None:
                    await asyncio.gather(_pass(reader, upstream[1]), _pass(upstream[0], writer))
                    upstream[1].close()
            writer.close()

        return accept

    async def _connect(self, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        ready = [backend for backend in self.backends if backend.is_ready]
        first = next(self._numbers)
        for index in range(len(ready)):
            backend = ready[(first + index) % len(ready)]
            host, _, port = (backend.http if protocol == "http" else backend.grpc).rpartition(":")
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(host, int(port))
        return None


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one end closes, which the other end is told."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
