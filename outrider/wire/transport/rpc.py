"""Channel and server options, and the one place where errors become gRPC statuses on the serving side.

The numbers were measured: the default receive limit (4 MiB) breaks a stream at K = 9 and a 128k vocabulary; without
`ping_timeout_ms` a hung peer is noticed after 60 s. With these it is noticed within 12 s, at either end.

Bytes that are no message end a call in INVALID_ARGUMENT, whoever serves it, where gRPC alone would answer UNKNOWN and
blame the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import re
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.wire.errors import InvalidRequest, OutriderError
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import is_loopback

log = get_logger(__name__)

Options = list[tuple[str, int]]
Parse = Callable[[Any, bytes], Any]
Abort = Callable[[Any, OutriderError], Any]

PING_TIMEOUT_MS = 10_000
"""A peer that acknowledges nothing for so long is gone. Longer than `hang_watch.MIN_SILENCE_S`, for a process that gets
no CPU answers no ping, and lives: whether one that has work hangs is for the hang watch to say. Twice as long, and what
a peer that hangs or is cut off holds is freed so much later.
"""
LINK_KEEPALIVE: Options = [("grpc.keepalive_time_ms", 2000), ("grpc.keepalive_permit_without_calls", 1)]
"""Of links between our own parts, where both ends agree, and of our servers."""
_TOKEN_ID_BYTES = 5
"""Bytes of a uint32 on the wire, at most."""
CONTROL_BYTES = 1 << 20
"""Bytes of a Control message beside token ids: sampling parameters, and small items that travel with it; and of a
message of facts, whole. Twice as much lets a peer hold up a worker's event loop by some 30 ms more a message.
"""
MAX_CONNECTIONS = 4096
"""To one server; a further one is refused. So many handshakes take some 200 MB."""
SPARE_FILES = 256
"""File descriptors for all but the connections of users: a gateway of one target has 21 open when idle."""
MAX_CALLS_OF_CONNECTION = 1024
"""Calls open at once on one connection; clients wait with a further one."""
HANDSHAKE_TIMEOUT_MS = PING_TIMEOUT_MS
"""Who connects and says nothing is left after this."""
MAX_METADATA_BYTES = 16 * 1024
"""Bytes of a call's metadata; one with more is refused with RESOURCE_EXHAUSTED."""
MAX_ERROR_BYTES = 1300
"""Bytes of an error's message: it travels as metadata, each byte as up to three, and clients take 8 KiB of that."""
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of a message between parts. Proposals go row by row: a vocabulary of 16 million would fit. Twice as much: so
much more may be held of each message."""


@dataclass(frozen=True, slots=True)
class _NoMessage:
    error: InvalidRequest


class _Requests:
    """The messages of one call. Raises InvalidRequest at the first that is none, and remembers it."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self.error: InvalidRequest | None = None

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        if isinstance(message, _NoMessage):
            self.error = message.error
            raise message.error
        return message


def guarded_stream(handler: Any, parse: Parse, abort: Abort) -> Any:
    """Return the same handler of a method with a stream of requests; errors of the tree become its status."""
    if handler.request_deserializer is None:
        return handler

    def read(data: bytes) -> Any:
        try:
            return parse(handler.request_deserializer, data)
        except InvalidRequest as error:
            return _NoMessage(error)

    if handler.response_streaming:
        inner, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    else:
        inner, make = handler.stream_unary, grpc.stream_unary_rpc_method_handler
    guarded = _generating(inner, abort) if inspect.isasyncgenfunction(inner) else _answering(inner, abort)
    return make(guarded, request_deserializer=read, response_serializer=handler.response_serializer)


def _answering(inner: Any, abort: Abort) -> Any:
    async def guarded(messages: AsyncIterator[Any], context: Any) -> Any:
        requests = _Requests(aiter(messages))
        try:
            answer = await inner(requests, context)
        except OutriderError as error:
            return await abort(context, error)
        return answer if requests.error is None else await abort(context, requests.error)

    return guarded


def _generating(inner: Any, abort: Abort) -> Any:
    async def guarded(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        requests = _Requests(aiter(messages))
        error: OutriderError | None = None
        try:
            async with contextlib.aclosing(inner(requests, context)) as answers:
                async for answer in answers:
                    yield answer
            error = requests.error
        except OutriderError as raised:
            error = raised
        if error is not None:
            await abort(context, error)

    return guarded


def _common(max_message_bytes: int, keepalive: Options) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        *keepalive,
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_files_limit() -> int | None:
    """Return how many files this process may have open; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def max_connections() -> int:
    """Return how many connections a server takes: MAX_CONNECTIONS, or fewer where the process may not open so many
    files. A gateway has two servers, so that each has half of what the other files leave.
    """
    limit = open_files_limit()
    if limit is None:
        return MAX_CONNECTIONS
    num_spare = min(SPARE_FILES, limit // 2)
    return min(MAX_CONNECTIONS, (limit - num_spare) // 2)


def max_control_bytes(context_limit: int) -> int:
    """Return the size of the largest message of a Control stream: a whole context, a prediction and a source as long,
    and what else may be in it.
    """
    return CONTROL_BYTES + 3 * _TOKEN_ID_BYTES * context_limit


def server_options(max_message_bytes: int, window_bytes: int = 64 << 10) -> Options:
    """Return a server's options. A second server on the same port fails and does not share the traffic.

    window_bytes: what comes in of a message before anybody reads it. One that is longer costs a round trip more.
    """
    return [
        *_common(max_message_bytes, LINK_KEEPALIVE),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.http2.bdp_probe", 0),  # it would let in more of messages that nobody reads yet
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]


def client_options(address: str, max_message_bytes: int, keepalive: Options = LINK_KEEPALIVE) -> Options:
    """Return the options of a client of `address`, host:port, which reconnect within a second: the default back-off
    grows to 120 s.

    What gRPC calls the least back-off is the time that it gives to connect, handshakes included: with less, a far or
    busy server is never reached. A proxy that the environment names (http_proxy) is not asked for loopback addresses.
    """
    return [
        *_common(max_message_bytes, keepalive),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", int(not _is_loopback(address))),
    ]


def proxy_note(address: str) -> str:
    """Return what to add where `address` does not answer: that a proxy may be between, by the variable that names it.
    Empty = none is. The variables, the first that is set, are gRPC's.
    """
    name = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if name in os.environ), "")
    if not os.environ.get(name) or _is_loopback(address):
        return ""
    return f"; {name} names a proxy, which is asked unless no_proxy lists the host"


def _is_loopback(address: str) -> bool:
    """Whether it is this machine's alone. address: host:port, behind a scheme or not, as in ipv4:127.0.0.1:80."""
    return is_loopback(re.sub(r"^(.*/|dns:|ipv[46]:)", "", address.rpartition(":")[0]).strip("[]"))


def tune_malloc() -> None:
    """Keep big buffers in the process: glibc otherwise returns and re-faults 2.5 MB for every message (3x slower)."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):  # not glibc
        return


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """Return code and details of a call that failed, in one line and bounded: the details are a peer's words."""
    return bound_text(f"{error.code().name}: {error.details()}", MAX_REASON_BYTES)


def error_trailers(error: OutriderError) -> tuple[tuple[str, str], ...]:
    """Return what a client needs besides code and message: parameter, seconds to wait, and OpenAI's code."""
    trailers: list[tuple[str, str]] = []
    if error.param is not None:
        trailers.append(("outrider-param", error.param))
    if error.retry_after_s is not None:
        trailers.append(("retry-after", f"{error.retry_after_s:g}"))
    if error.openai_code is not None:
        trailers.append(("outrider-code", error.openai_code))
    return tuple(trailers)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's code, message and trailers."""
    message = error.message.encode(errors="replace")
    if len(message) > MAX_ERROR_BYTES:
        message = message[:MAX_ERROR_BYTES] + b"..."
    await context.abort(error.grpc_code, message.decode(errors="ignore"), error_trailers(error))
    raise AssertionError("abort returned")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Maps the error tree, and requests that are no message, to statuses."""

    def __init__(self, max_control_bytes: int | None = None) -> None:
        """`max_control_bytes`: a longer message of a Control stream is refused before it is parsed."""
        self._parse_control = functools.partial(parse_message, max_bytes=max_control_bytes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is not None and handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guarded(handler, handler.unary_unary), response_serializer=handler.response_serializer
            )
        if handler is not None and inspect.iscoroutinefunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                _guarded(handler, handler.unary_stream), response_serializer=handler.response_serializer
            )
        if handler is not None and handler.request_streaming:
            is_control = str(handler_call_details.method).endswith("/Control")
            return guarded_stream(handler, self._parse_control if is_control else parse_message, abort)
        return handler


def _guarded(handler: Any, inner: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
    """Parses the request itself: gRPC would answer UNKNOWN to bytes that are no message, and blame the server."""

    async def guarded(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(parse_message(handler.request_deserializer, data), context)
        except OutriderError as error:
            await abort(context, error)

    return guarded


def parse_message(deserialize: Any, data: bytes, max_bytes: int | None = None) -> Any:
    """Parse a message; `deserialize` is its class's FromString. Raises InvalidRequest."""
    name = deserialize.__self__.DESCRIPTOR.full_name
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidRequest(f"a {name} of {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        return deserialize(data)
    except DecodeError:
        raise InvalidRequest(
            f"the message of {len(data)} bytes is no valid {name}; text must be UTF-8 and the client of this version"
        ) from None
