"""Channel and server options, and the one place where errors become gRPC statuses on the serving side.

The numbers were measured: the default receive limit (4 MiB) breaks a stream at K = 9 and a 128k vocabulary; without
`ping_timeout_ms` a hung peer is noticed after 60 s. With these it is noticed within 4 s, at either end.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError
from outrider.wire.log import get_logger
from outrider.wire.request_streams import guarded_stream

log = get_logger(__name__)

Options = list[tuple[str, int]]

MAX_CONNECTIONS = 4096
"""To one server; a further one is closed at once."""
MAX_CALLS_OF_CONNECTION = 1024
"""Open at once on one connection. Clients wait with a further one."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""Who connects and says nothing is left after this."""
MAX_METADATA_BYTES = 16 * 1024
"""Of a call; one with more is refused with RESOURCE_EXHAUSTED."""
MAX_ERROR_BYTES = 1300
"""Of an error's message: it travels as metadata, each byte as up to three, and clients take 8 KiB of that."""


def _common(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.ping_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int, window_bytes: int = 64 << 10) -> Options:
    """A second server on the same port must fail, not share the traffic: hence so_reuseport 0.

    window_bytes: what comes in of a message before anybody reads it. One that is longer costs a round trip more.
    """
    return [
        *_common(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.http2.bdp_probe", 0),  # it would let in more of messages that nobody reads yet
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]


def client_options(max_message_bytes: int) -> Options:
    """Reconnects within a second: the default back-off grows to 120 s.

    What gRPC calls the least back-off is the time that it gives to connect, handshakes included: with less, a far or
    busy server is never reached.
    """
    return [
        *_common(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


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


def error_trailers(error: OutriderError) -> tuple[tuple[str, str], ...]:
    """What a client needs besides code and message: the parameter, when to come back, which of its kind it is."""
    trailers: list[tuple[str, str]] = []
    if error.param is not None:
        trailers.append(("outrider-param", error.param))
    if error.retry_after_s is not None:
        trailers.append(("retry-after", f"{error.retry_after_s:g}"))
    if error.openai_code is not None:
        trailers.append(("outrider-code", error.openai_code))
    return tuple(trailers)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    message = error.message.encode(errors="replace")
    if len(message) > MAX_ERROR_BYTES:
        message = message[:MAX_ERROR_BYTES] + b"..."
    await context.abort(error.grpc_code, message.decode(errors="ignore"), error_trailers(error))
    raise AssertionError("abort returned")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Maps the error tree, and requests that are no message, to statuses."""

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
            return guarded_stream(handler, parse_message, abort)
        return handler


def _guarded(handler: Any, inner: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
    """Parses the request itself: gRPC would answer UNKNOWN to bytes that are no message, and blame the server."""

    async def guarded(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(parse_message(handler.request_deserializer, data), context)
        except OutriderError as error:
            await abort(context, error)

    return guarded


def parse_message(deserialize: Any, data: bytes) -> Any:
    """`deserialize`: a message class's FromString. Raises InvalidRequest."""
    try:
        return deserialize(data)
    except DecodeError:
        name = deserialize.__self__.DESCRIPTOR.full_name
        raise InvalidRequest(
            f"the message of {len(data)} bytes is no valid {name}; text must be UTF-8 and the client of this version"
        ) from None


def check_message_size(vocab_size: int, max_message_bytes: int) -> None:
    """Refuse at start what would kill the stream later: proposals go row by row, so one row (with slack) must fit.

    Raises ConfigError.
    """
    need = vocab_size * 4 + (1 << 16)
    if need > max_message_bytes:
        raise ConfigError(
            f"max_message_bytes is {max_message_bytes}, one row of {vocab_size} log-probs needs {need}; raise it",
            param="max_message_bytes",
        )
