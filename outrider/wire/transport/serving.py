"""gRPC servers with health and reflection services: `start_server` starts one on the current event loop, `ServerThread`
on an event loop in its own thread.

Use gRPC on only one event loop per process: calls on a second one take 4 times as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import join_host_port
from outrider.wire.transport.call_limits import LimitInterceptor
from outrider.wire.transport.health_servicer import HealthServicer
from outrider.wire.transport.roles import RoleInterceptor
from outrider.wire.transport.rpc import MAX_CONNECTIONS, ErrorInterceptor, server_options
from outrider.wire.transport.tls import CertificateFolder, server_credentials

log = get_logger(__name__)

MAX_CONCURRENT_CALLS = MAX_CONNECTIONS
"""Maximum number of open calls on a server, streams included. Further calls are refused with RESOURCE_EXHAUSTED."""

WORKER_WINDOW_BYTES = 1 << 20
"""Number of bytes of a message that may arrive at a worker's server before its servicer reads it. A distribution over a
whole vocabulary has half a megabyte; with a smaller window its message would take another round trip."""

AddServices = Callable[[grpc.aio.Server], Sequence[str]]
"""Function that adds servicers to a server and returns the full names of their services."""


async def _is_known(host: str) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False
    return True


async def start_server(
    add_services: AddServices,
    host: str,
    port: int,
    max_message_bytes: int,
    certificates: CertificateFolder | None = None,
    window_bytes: int = 64 << 10,
    max_control_bytes: int | None = None,
) -> tuple[grpc.aio.Server, str, HealthServicer]:
    """Start a gRPC server on the current event loop. Return (server, "host:port" on which it listens, health servicer).
    Raises ConfigError if it cannot listen there.

    port: 0 = take a free port. max_message_bytes: maximum bytes of a received message. certificates: None = no TLS. If
    the folder has a role, clients must show a certificate, and may call only what their role allows; without a role,
    the server is for users. window_bytes: number of bytes of a message that may arrive before the servicer begins to
    read it. max_control_bytes: maximum bytes of a message on a Control stream; None = only max_message_bytes limits it.
    """
    guards = list[RoleInterceptor]()
    if certificates is not None and certificates.role is not None:
        guards.append(RoleInterceptor())
    server = grpc.aio.server(
        options=server_options(max_message_bytes, window_bytes),
        interceptors=[*guards, LimitInterceptor(), ErrorInterceptor(max_control_bytes)],
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )
    names = [*add_services(server), health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_servicer = HealthServicer(names)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    address = join_host_port(host, port)
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, server_credentials(certificates))
    except RuntimeError:
        if not await _is_known(host):
            raise ConfigError(f"cannot listen on {address}: no address is known for {host!r}", param="host") from None
        raise ConfigError(
            f"cannot listen on {address}: the port is taken or the address is not this machine's; choose another",
            param="port",
        ) from None
    await server.start()
    return server, join_host_port(host, bound), health_servicer


class ServerThread:
    """A thread with an event loop and a gRPC server, which runs until `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.address = ""
        self._thread = threading.Thread(target=self._run, name="grpc-loop", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._health: HealthServicer | None = None

    def start(
        self,
        add_services: AddServices,
        host: str,
        port: int,
        max_message_bytes: int,
        certificates: CertificateFolder | None = None,
        max_control_bytes: int | None = None,
    ) -> str:
        """Start the thread and the server. Return the server's address (host:port) once it listens.

        add_services: function that adds servicers to the server; called on the new thread. port: 0 = take a free port.
        max_message_bytes: maximum bytes of a received message. certificates: None = no TLS. max_control_bytes: maximum
        bytes of a message on a Control stream; None = only max_message_bytes limits it. Raises ConfigError if the
        server cannot listen there.
        """
        self._thread.start()
        start = start_server(
            add_services, host, port, max_message_bytes, certificates, WORKER_WINDOW_BYTES, max_control_bytes
        )
        try:
            self._server, self.address, self._health = asyncio.run_coroutine_threadsafe(start, self.loop).result(30)
        except BaseException:
            self._end_loop()
            raise
        return self.address

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def post(self, calls: list[Callable[[], None]]) -> None:
        """Call the functions `calls` on the thread's event loop, in order, with a single wake-up of the loop. Any
        thread may call this. If the loop has ended, the functions are not called.

        If a function raises, the error is logged and the others are still called, since they reply to other requests.
        """

        def run() -> None:
            for call in calls:
                try:
                    call()
                except Exception:
                    log.exception("an answer could not be sent")

        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(run)

    def stop_serving(self, begin: Callable[[], None]) -> None:
        """Set the server's health to NOT_SERVING, right after calling `begin` on the thread's event loop. Open calls
        continue. Any thread may call this. begin: function that makes the servicers refuse new work.
        """

        async def run() -> None:
            begin()
            if self._health is not None:
                self._health.set_serving(False)

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def stop(self, grace_s: float, closing: Callable[[], Awaitable[None]] | None = None) -> None:
        """Set the server's health to NOT_SERVING, wait at most `grace_s` seconds until open calls have ended, and end
        server, event loop and thread.

        closing: coroutine function that is awaited before the wait and ends open streams. None = streams that clients
        leave open make the wait last for all of `grace_s`.
        """

        async def shut() -> None:
            if self._health is not None:
                self._health.set_serving(False)
            if closing is not None:
                await closing()
            if self._server is not None:
                await self._server.stop(grace_s)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(shut(), self.loop).result(grace_s + 10)
            self._end_loop()

    def _end_loop(self) -> None:
        async def cancel_tasks() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_tasks(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
