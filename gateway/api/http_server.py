"""The HTTP server: uvicorn with limits on connections, and on the size and arrival time of request heads.

`gateway.__main__` binds the port, creates an HttpServer for the application, and stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import bind_all
from outrider.wire.transport.rpc import max_connections, open_files_limit

log = get_logger(__name__)

_DATE_S = 1.0
"""Seconds between two updates of the `date` header of responses, which shows whole seconds."""
HEAD_TIMEOUT_S = 10.0
"""Seconds within which the head of a request must arrive, from the start of the connection or the first byte of the
request. A TLS handshake has the same limit."""
MAX_HEAD_BYTES = 64 * 1024
"""Maximal size of a request's head, in bytes. The same limit holds for the bytes between two pieces of a body, such as
chunk sizes."""
MAX_HEADERS = 256
"""Maximal number of headers of a request."""
MAX_PIPELINED = 8
"""Maximal number of requests that wait on a connection while an earlier one is answered. A connection with more is
closed."""
LIMIT_LOG_INTERVAL_S = 60.0
"""Minimal number of seconds between two log lines that report that the limit of connections is reached."""
UNREAD_TIMEOUT_MS = 60_000
"""Milliseconds after which the kernel drops a connection whose peer acknowledges none of the sent data."""
BACKLOG = 2048
"""Maximal number of connections that wait in the kernel to be accepted."""


class PlainParser(httptools.HttpRequestParser):
    """A parser for HTTP requests that ignores the header `Upgrade`, as RFC 9110, 7.8 allows.

    llhttp assumes that a request with this header ends after its head, and would parse the body as the next request.
    This parser reads the head a second time without the header, and then the body.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        """Parse more bytes of the connection. Raises HttpParserError for bytes that are not HTTP, and for CONNECT."""
        while data:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        method = self.get_method()
        version = self.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("this is no proxy")
        headers = [name + b": " + value for name, value in self._protocol.headers if name != b"upgrade"]
        return b"\r\n".join([method + b" " + self._protocol.url + b" HTTP/" + version, *headers, b"", b""])


class ConnectionLimit:
    """Limit on the number of open connections of one server, derived from how many files the process may open."""

    def __init__(self) -> None:
        self.max_connections = max_connections()
        self._logged_s = -math.inf

    def is_exceeded_by(self, num_connections: int) -> bool:
        """Return whether `num_connections` is more than the limit.

        If it is, a warning is logged, at most once every LIMIT_LOG_INTERVAL_S.
        """
        if num_connections <= self.max_connections:
            return False
        now_s = time.monotonic()
        if now_s - self._logged_s >= LIMIT_LOG_INTERVAL_S:
            self._logged_s = now_s
            text = "%d connections are open, as many as this server takes (open files: %s); further ones get 503"
            log.warning(text, self.max_connections, open_files_limit() or "unlimited")
        return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with limits on the time and size of a request's head. uvicorn alone has neither limit."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, limit: ConnectionLimit) -> None:
        super().__init__(config, server_state, {})
        self._limit = limit

    _timer: asyncio.TimerHandle | None = None
    _num_open = 0
    """Number of requests whose responses are not complete."""
    _in_body = False
    """Whether the body of a request is being received now."""
    _num_head_bytes = 0
    """Number of bytes received since the end of the last head, piece of a body, or message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = PlainParser(self)
        if self._limit.is_exceeded_by(len(self.connections)):
            self._refuse(503, "too many connections; try again later", "retry-after: 1")
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head is over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"the request has over {MAX_HEADERS} headers")
            raise httptools.HttpParserError("too many headers")  # so that nothing more is read

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        self._num_head_bytes = 0
        if self._num_open > MAX_PIPELINED:
            self.transport.close()
            raise httptools.HttpParserError("too many requests")
        self._num_open += 1
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_head_bytes = 0
        self._in_body = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # The rest of a body that is no longer read may arrive for HEAD_TIMEOUT_S: its sender then gets the response.
        self._num_open -= 1
        super().on_response_complete()
        if self._in_body and not self._num_open:
            self._start_timer()

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
        if self._num_head_bytes:
            self._refuse(408, f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s")
        self.transport.close()

    def _refuse(self, status: int, text: str, *headers: str) -> None:
        if self.transport.is_closing():
            return
        if self._num_open <= self._in_body:  # no response has begun, in the middle of which this one would be
            phrase = HTTPStatus(status).phrase
            kind = "server_error" if status >= 500 else "invalid_request_error"
            body = f'{{"error": {{"message": "{text}", "type": "{kind}", "param": null, "code": null}}}}'
            head = ["content-type: application/json", f"content-length: {len(body)}", "connection: close", *headers]
            self.transport.write("\r\n".join([f"HTTP/1.1 {status} {phrase}", *head, "", body]).encode())
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an ASGI application on sockets that are already bound.

    It installs no signal handlers, because the process handles signals and stops its HTTP and gRPC servers together.
    """

    def __init__(self, app: Any, keep_alive_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Create a server that does not listen yet.

        keep_alive_s: seconds for which a connection may be idle between two requests. tls: None for plain HTTP.
        """
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
        self.config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]  # its constructor takes whole seconds
        self._tls = tls
        self._stopping = asyncio.Event()
        self._limit = ConnectionLimit()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. A TLS handshake may take HEAD_TIMEOUT_S seconds."""
        await super().startup([])
        handshake_timeout_s = None
        if self._tls is not None:
            handshake_timeout_s = HEAD_TIMEOUT_S
        for listener in sockets or []:
            self.servers.append(
                await asyncio.get_running_loop().create_server(
                    lambda: BoundedProtocol(self.config, self.server_state, self._limit),
                    sock=listener,
                    backlog=BACKLOG,
                    ssl=self._tls,
                    ssl_handshake_timeout=handshake_timeout_s,
                )
            )

    async def main_loop(self) -> None:
        """Wait until `stop` is called. It replaces uvicorn's loop, which checks ten times a second whether to stop."""
        while not await self.on_tick(0):  # which renews the header `date`
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stopping.wait()

    def stop(self) -> None:
        """Make `serve` return soon. Must be called on the event loop."""
        self.should_exit = True
        self._stopping.set()

    def drain(self) -> None:
        """Close idle connections now, and the others after their current response, which has `Connection: close`.

        A connection that is opened after this call serves one request and is then closed.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # uvicorn makes the default headers from these once a second
        headers = [*self.server_state.default_headers, close]
        self.server_state.default_headers = headers
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None:
                connection.cycle.default_headers = headers  # older uvicorn leaves it out here
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager that does nothing. uvicorn's own would replace the process's signal handlers."""
        yield


def raise_descriptor_limit() -> None:
    """Raise the number of files that this process may open to the most that the system allows.

    The usual limit, 1024, is too low for the connections of the HTTP and the gRPC server.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit and then takes none
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int, option: str = "--port") -> list[socket.socket]:
    """Return a socket for each address of `host`, bound to `port` and not yet listening.

    option: command-line option that sets the port. Raises ConfigError, which names the option, if the port is taken.
    """
    listeners = bind_all(host, port, option)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux, and handed on to each connection
        for listener in listeners:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
    return listeners
