"""Limits of a server's calls: how many calls of a kind may be open, and how many messages may be received at once, in
all and per client. A client is a host or, with TLS, a host with the role that its certificate names. `serving` installs
`LimitInterceptor`; the gateway's gRPC API uses the limits for its own calls.

Once gRPC starts to read a message it receives all of it, and keeps the bytes in memory until the rest has arrived.
Therefore unary calls are served here as streams of one message, which is read only when the limits allow it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded, RequestTooSlow
from outrider.wire.transport.rpc import abort

MAX_MESSAGES = 16
"""Maximum number of unary calls whose messages a server receives at the same time. The calls of one client may take a
quarter of them. Further calls wait."""
MAX_WAITING = 256
"""Maximum number of open unary calls of one client whose message has not arrived yet. Further calls are refused."""
MESSAGE_TIMEOUT_S = 10.0
"""Maximum seconds from the start of a unary call until its request message has arrived, including the time for which
MAX_MESSAGES makes the call wait."""
MAX_DELIVERY_STREAMS = 256
"""Maximum number of open streams that bring draft tokens to a target, one from each draft worker; further ones are
refused. A single client may have a quarter of them. Each may hold one message of the maximum size in the target's
memory."""
MAX_WATCHING_CALLS = 16
"""Maximum number of open calls that watch a server's health or list its services. One client may have a quarter of
them."""
RETRY_S = 1.0
"""Seconds after which a client should try a refused call again. The error has this number as `retry-after`."""

_END: Any = getattr(grpc.aio, "EOF")  # noqa: B009  # the stubs lack it


class CallLimits:
    """Limits on the number of open calls of one kind: at most `total` in all, and at most `share` for one value of
    `client`, which stands for who calls, such as a host. Calls beyond either limit are refused.

    kind: the kind of calls, for the error's text, such as "streams bring proposals". It has no lock, so use it on one
    event loop only.
    """

    def __init__(self, kind: str, total: int, share: int) -> None:
        self._kind = kind
        self._total = total
        self._share = share
        self._num_open: Counter[str] = Counter()
        """Number of open calls by the value of `client`."""

    @contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Context manager: count an open call during the block. client: who calls, such as a host. Raises Overloaded if
        a limit is reached.
        """
        total = self._num_open.total()
        own = self._num_open[client]
        if total >= self._total or own >= self._share:
            raise Overloaded(
                f"{total} {self._kind}, {own} of this client; at most {self._total} and {self._share} are allowed; "
                "try again later",
                retry_after_s=RETRY_S,
            )
        self._num_open[client] += 1
        try:
            yield
        finally:
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]


class CallQueue:
    """Limits on the number of running calls: at most `total` in all, and at most `share` for one value of `client`,
    which stands for who calls, such as a host. Calls beyond either limit wait; those with the same `client` run in the
    order in which they arrived.

    waiting: counts the calls that run or wait, and refuses those beyond its own limits.
    """

    def __init__(self, total: int, share: int, waiting: CallLimits) -> None:
        self._all = asyncio.Semaphore(total)
        self._share = share
        self._waiting = waiting
        self._by_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def one(self, client: str) -> AsyncIterator[None]:
        """Context manager: wait until another call of `client` (who calls, such as a host) may run, and count it during
        the block. Raises Overloaded if too many calls wait.
        """
        own = self._by_client.get(client) or asyncio.Semaphore(self._share)
        self._by_client[client] = own
        with self._waiting.one(client):
            async with own, self._all:
                yield


def host_of(context: Any) -> str:
    """Return the host of the peer that made a call: its address without the port."""
    return str(context.peer()).rpartition(":")[0]


def _client_of(context: Any) -> str:
    # The host, and the names in the certificate if there is one: processes of one machine are then different clients.
    uris = context.auth_context().get("peer_uri", ())
    names = sorted(uri.decode(errors="replace") for uri in uris)
    return " ".join([host_of(context), *names])


class LimitInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Interceptor that limits the open calls of a server, in all and per calling host (with TLS, per host and role),
    before it reads a call's message.
    """

    def __init__(self) -> None:
        looking = CallLimits("calls watch health or ask for services", MAX_WATCHING_CALLS, MAX_WATCHING_CALLS // 4)
        delivering = CallLimits("streams bring proposals", MAX_DELIVERY_STREAMS, MAX_DELIVERY_STREAMS // 4)
        self._limits = {
            "/grpc.health.v1.Health/Watch": looking,
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": looking,
            "/outrider.v1.TargetService/Deliver": delivering,
        }
        waiting = CallLimits("calls await their message", 4 * MAX_WAITING, MAX_WAITING)
        self._queue = CallQueue(MAX_MESSAGES, MAX_MESSAGES // 4, waiting)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        limits = self._limits.get(str(handler_call_details.method))
        if not handler.request_streaming:
            handler = _as_stream(handler, self._queue)
        if limits is None:
            return handler
        return _limited(handler, limits)


def _as_stream(handler: Any, queue: CallQueue) -> Any:
    # The same unary method as a stream, whose only message is read when `queue` allows it.
    if handler.response_streaming:
        inner = handler.unary_stream
        create_handler = grpc.stream_stream_rpc_method_handler
    else:
        inner = handler.unary_unary
        create_handler = grpc.stream_unary_rpc_method_handler

    async def respond(_: object, context: Any) -> Any:
        try:
            data = await _read_message(context, queue)
        except OutriderError as error:
            return await abort(context, error)
        return await inner(data, context)

    async def respond_stream(_: object, context: Any) -> AsyncIterator[Any]:
        try:
            data = await _read_message(context, queue)
        except OutriderError as error:
            await abort(context, error)
        async for response in inner(data, context):
            yield response

    serve = respond_stream if inspect.isasyncgenfunction(inner) else respond
    return create_handler(serve, handler.request_deserializer, handler.response_serializer)


async def _read_message(context: Any, queue: CallQueue) -> Any:
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S), queue.one(_client_of(context)):
            data = await context.read()
    except TimeoutError:
        raise RequestTooSlow(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s; send it faster") from None
    if data is _END:
        raise InvalidRequest("the call ended without its message")
    return data


def _limited(handler: Any, limits: CallLimits) -> Any:
    kind = "stream_stream" if handler.response_streaming else "stream_unary"
    inner = getattr(handler, kind)

    async def respond(messages: Any, context: Any) -> Any:
        try:
            with limits.one(_client_of(context)):
                return await inner(messages, context)
        except Overloaded as error:
            return await abort(context, error)

    async def respond_stream(messages: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with limits.one(_client_of(context)):
                async for message in inner(messages, context):
                    yield message
        except Overloaded as error:
            await abort(context, error)

    serve = respond_stream if inspect.isasyncgenfunction(inner) else respond
    return handler._replace(**{kind: serve})
