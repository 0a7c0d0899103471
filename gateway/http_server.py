"""uvicorn with bounds on what a client may do to a connection: heads that do not end, silence, too many at once."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider.wire.address import join_host_port
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

HEAD_TIMEOUT_S = 10.0
"""From a connection's beginning, or a request's first byte, to the end of its head."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a head, and of anything else between two pieces of a body."""
MAX_HEADERS = 256
MAX_PIPELINED = 8
"""Requests that wait behind the one that is answered. Hardly a client sends any; a connection with more is closed."""
MAX_CONNECTIONS = 4096
UNREAD_TIMEOUT_MS = 60_000
"""The kernel drops a connection whose peer takes nothing of what was sent for this long."""
BACKLOG = 2048
ACCEPT_PAUSE_S = 0.5
"""Before the next try to accept, when the process has no descriptors left."""

log = get_logger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn itself waits for ever for a head, and for one of any size."""

    _timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The others wait in `pipeline`."""
    _num_loose_bytes = 0
    """Since the last head, piece of a body or end of a message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "too many connections; try again later", "retry-after: 1")
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        self._num_loose_bytes += len(data)
        super().data_received(data)
        if self._num_loose_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head is over {MAX_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) < MAX_HEADERS:
            super().on_header(name, value)
        else:
            self._refuse(431, f"the request has over {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._num_loose_bytes = 0
        if self.transport.is_closing():
            return
        self._stop_timer()
        if len(self.pipeline) < MAX_PIPELINED:
            super().on_headers_complete()
        else:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_loose_bytes = 0
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_loose_bytes = 0
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A body that nobody wants any more may go on for a moment, so that its sender reads the answer."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:  # uvicorn tells the latest alone
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self._num_loose_bytes and not self.transport.is_closing():
            self._refuse(408, f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str, *headers: str) -> None:
        """Before there is a request that the application could answer; or in the middle of one, which then ends."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            phrase = HTTPStatus(status).phrase
            kind = "server_error" if status >= 500 else "invalid_request_error"
            body = f'{{"error": {{"message": "{text}", "type": "{kind}", "param": null, "code": null}}}}'
            head = ["content-type: application/json", f"content-length: {len(body)}", "connection: close", *headers]
            self.transport.write("\r\n".join([f"HTTP/1.1 {status} {phrase}", *head, "", body]).encode())
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves on a socket that is bound already. Signals are the process's: HTTP and gRPC stop together."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._secured: set[asyncio.Task[None]] = set()
        """Connections whose handshake goes on."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn gives a handshake a minute, and knows nothing of the connection before its end."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(listener, self._tls)) for listener in sockets or []]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for task in list(self._secured):
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except ConnectionError:
                continue  # it left before it was accepted
            except OSError as error:
                log.error("a connection cannot be accepted: %s", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._secured) + len(self.server_state.connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._secure(connection, tls))
            self._secured.add(task)
            task.add_done_callback(self._secured.discard)

    async def _secure(self, connection: socket.socket, tls: ssl.SSLContext) -> None:
        """Whoever does not end the handshake in time, or cannot, is left."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: BoundedProtocol(self.config, self.server_state, self.lifespan.state),
                connection,
                ssl=tls,
                ssl_handshake_timeout=HEAD_TIMEOUT_S,
            )

    def install_signal_handlers(self) -> None:
        return

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def raise_descriptor_limit() -> None:
    """To what the system lets this process have: the usual 1024 are fewer than MAX_CONNECTIONS."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit and then takes none
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """Before anything is announced, so that a taken port is an error at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux, and handed on to each connection
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {join_host_port(host, port)}: {error.strerror}; choose another --port", param="port"
        ) from None
    return listener
