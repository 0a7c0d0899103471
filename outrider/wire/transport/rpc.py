"""Options of gRPC channels and servers, and `ErrorInterceptor`, where errors become gRPC statuses on a server.

Why options are set: with gRPC's default receive limit (4 MiB) a stream breaks at K = 9 and a vocabulary of 128k.
Without `ping_timeout_ms` either end detects a hanging peer after 60 s, and with it within 12 s.

A call whose bytes are not a valid message ends with INVALID_ARGUMENT. gRPC alone would return UNKNOWN, which stands for
an error of the server.
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
"""Milliseconds without a reply to a ping after which the connection to a peer counts as lost. It is longer than
`hang_watch.MIN_SILENCE_S`: a process that gets no CPU time does not reply to pings either, and the hang watch is to
decide whether it hangs."""
LINK_KEEPALIVE: Options = [("grpc.keepalive_time_ms", 2000), ("grpc.keepalive_permit_without_calls", 1)]
"""gRPC options for keepalive pings (every 2 s), for connections between our processes and for our servers."""
_TOKEN_ID_BYTES = 5
"""Maximum bytes of a uint32 in a protobuf message."""
CONTROL_BYTES = 1 << 20
"""Maximum bytes of a message on a Control stream without its token ids (sampling parameters and small items), and of a
WorkerInfo message. A message of this size occupies a worker's event loop for some 30 ms."""
MAX_CONNECTIONS = 4096
"""Maximum number of connections to one server; further ones are refused. The handshakes of this many connections take
some 200 MB."""
SPARE_FILES = 256
"""Number of file descriptors that users' connections may not take, so that the process can still open files."""
MAX_CALLS_OF_CONNECTION = 1024
"""Maximum number of open calls on one connection. Clients wait before they open another."""
HANDSHAKE_TIMEOUT_MS = PING_TIMEOUT_MS
"""Milliseconds after which a new connection is closed if its handshake has not been completed."""
MAX_METADATA_BYTES = 16 * 1024
"""Maximum bytes of a call's metadata. A call with more is refused with RESOURCE_EXHAUSTED."""
MAX_ERROR_BYTES = 1300
"""Maximum bytes of an error's message. The message is sent as gRPC metadata, where each of its bytes takes up to three
bytes, and clients accept 8 KiB of metadata."""
MAX_MESSAGE_BYTES = 64 << 20
"""Maximum bytes of a message between our processes. A proposal may be sent with one distribution per message, so that
a vocabulary of 16 million tokens fits."""


@dataclass(frozen=True, slots=True)
class _InvalidMessage:
    error: InvalidRequest


class _Requests:
    # The messages of one call. It raises InvalidRequest at the first that is not valid, and keeps the error.

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self.error: InvalidRequest | None = None

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        if isinstance(message, _InvalidMessage):
            self.error = message.error
            raise message.error
        return message


def guarded_stream(handler: Any, parse: Parse, abort: Abort) -> Any:
    """Return a gRPC method handler that works like `handler`, but ends the call with the matching gRPC status if an
    OutriderError is raised. The method must receive a stream of messages.

    parse: parses the bytes of one message, and raises InvalidRequest if they are not a valid message. abort: ends a
    call with an error.
    """
    if handler.request_deserializer is None:
        return handler

    def read(data: bytes) -> Any:
        try:
            return parse(handler.request_deserializer, data)
        except InvalidRequest as error:
            return _InvalidMessage(error)

    if handler.response_streaming:
        inner = handler.stream_stream
        create_handler = grpc.stream_stream_rpc_method_handler
    else:
        inner = handler.stream_unary
        create_handler = grpc.stream_unary_rpc_method_handler
    if inspect.isasyncgenfunction(inner):
        guarded = _guarded_generator(inner, abort)
    else:
        guarded = _guarded_coroutine(inner, abort)
    return create_handler(guarded, request_deserializer=read, response_serializer=handler.response_serializer)


def _guarded_coroutine(inner: Any, abort: Abort) -> Any:
    async def guarded(messages: AsyncIterator[Any], context: Any) -> Any:
        requests = _Requests(aiter(messages))
        try:
            response = await inner(requests, context)
        except OutriderError as error:
            return await abort(context, error)
        if requests.error is not None:
            return await abort(context, requests.error)
        return response

    return guarded


def _guarded_generator(inner: Any, abort: Abort) -> Any:
    async def guarded(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        requests = _Requests(aiter(messages))
        error: OutriderError | None = None
        try:
            async with contextlib.aclosing(inner(requests, context)) as responses:
                async for response in responses:
                    yield response
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
    """Return the maximum number of files that this process may have open at once; None = there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return soft


def max_connections() -> int:
    """Return the maximum number of connections of one server: MAX_CONNECTIONS, or fewer if this process may open too
    few files. A gateway has two servers, and each gets half of the files that remain after SPARE_FILES.
    """
    limit = open_files_limit()
    if limit is None:
        return MAX_CONNECTIONS
    num_spare = min(SPARE_FILES, limit // 2)
    return min(MAX_CONNECTIONS, (limit - num_spare) // 2)


def max_control_bytes(context_limit: int) -> int:
    """Return the maximum bytes of a message on a Control stream. It is CONTROL_BYTES, plus the token ids of a prompt, a
    prediction and a source (the input of an encoder), each of `context_limit` tokens.

    context_limit: maximum number of tokens of the model's context.
    """
    return CONTROL_BYTES + 3 * _TOKEN_ID_BYTES * context_limit


def server_options(max_message_bytes: int, window_bytes: int = 64 << 10) -> Options:
    """Return the gRPC options of a server. They also make the start of a second server on the same port fail; by gRPC's
    default the two would share the port.

    max_message_bytes: maximum bytes of a received message. window_bytes: number of bytes of a message that may arrive
    before the servicer begins to read it. A longer message takes another round trip.
    """
    return [
        *_common(max_message_bytes, LINK_KEEPALIVE),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.http2.bdp_probe", 0),  # it would raise window_bytes
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]


def client_options(address: str, max_message_bytes: int, keepalive: Options = LINK_KEEPALIVE) -> Options:
    """Return the gRPC options for a client of the server at `address` (host:port).

    The client tries to reconnect after 2 s at most, by gRPC's default after up to 120 s. These 2 s are also the time
    that a connection attempt may take. A proxy that the environment names (http_proxy) is not used for loopback
    addresses.
    """
    return [
        *_common(max_message_bytes, keepalive),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", int(not _is_loopback(address))),
    ]


def proxy_note(address: str) -> str:
    """Return text for the end of an error on an `address` that does not reply: a note that a proxy is used, with the
    environment variable that names it. The text is empty if no proxy is used.
    """
    name = _proxy_variable()
    if name is None or not os.environ[name] or _is_loopback(address):
        return ""
    return f"; {name} names a proxy, which is asked unless no_proxy lists the host"


def _proxy_variable() -> str | None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):  # gRPC uses the first that is set
        if name in os.environ:
            return name
    return None


def _is_loopback(address: str) -> bool:
    # address: host:port, with a scheme or not, such as ipv4:127.0.0.1:80
    return is_loopback(re.sub(r"^(.*/|dns:|ipv[46]:)", "", address.rpartition(":")[0]).strip("[]"))


def tune_malloc() -> None:
    """Configure glibc's allocator to keep freed large buffers in this process. By default it returns them to the kernel
    and gets them again for the next message: one of 2.5 MB then takes 3 times as long.
    """
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):  # not glibc
        return


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """Return status code and details of a failed call as one line. Its length is bounded, since the details are a text
    from another process.
    """
    return bound_text(f"{error.code().name}: {error.details()}", MAX_REASON_BYTES)


def error_trailers(error: OutriderError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that is sent with an error in addition to gRPC's code and message: the parameter
    that is at fault, the seconds until the client should try again, and OpenAI's error code.
    """
    trailers: list[tuple[str, str]] = []
    if error.param is not None:
        trailers.append(("outrider-param", error.param))
    if error.retry_after_s is not None:
        trailers.append(("retry-after", f"{error.retry_after_s:g}"))
    if error.openai_code is not None:
        trailers.append(("outrider-code", error.openai_code))
    return tuple(trailers)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End a gRPC call with the code, message and trailing metadata of an error."""
    message = error.message.encode(errors="replace")
    if len(message) > MAX_ERROR_BYTES:
        message = message[:MAX_ERROR_BYTES] + b"..."
    await context.abort(error.grpc_code, message.decode(errors="ignore"), error_trailers(error))
    raise AssertionError("abort returned")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Interceptor that ends a call with the matching gRPC status if its servicer raises an OutriderError, or if a
    request is not a valid message.

    max_control_bytes: maximum bytes of a message on a Control stream; a longer one is refused before it is parsed. None
    = no limit.
    """

    def __init__(self, max_control_bytes: int | None = None) -> None:
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
            parse: Parse = parse_message
            if str(handler_call_details.method).endswith("/Control"):
                parse = self._parse_control
            return guarded_stream(handler, parse, abort)
        return handler


def _guarded(handler: Any, inner: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
    # Parses the request itself: for bytes that are no valid message gRPC would return UNKNOWN, a server's error.
    async def guarded(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(parse_message(handler.request_deserializer, data), context)
        except OutriderError as error:
            await abort(context, error)

    return guarded


def parse_message(deserialize: Any, data: bytes, max_bytes: int | None = None) -> Any:
    """Parse the bytes of a protobuf message and return the message. Raises InvalidRequest if the bytes are no valid
    message, or more than `max_bytes`.

    deserialize: the method `FromString` of the message's class. max_bytes: None = no limit.
    """
    name = deserialize.__self__.DESCRIPTOR.full_name
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidRequest(f"a {name} of {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        return deserialize(data)
    except DecodeError:
        raise InvalidRequest(
            f"the message of {len(data)} bytes is no valid {name}; text must be UTF-8 and the client of this version"
        ) from None
