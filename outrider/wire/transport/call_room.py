"""Room for calls: how many of a kind are open, and how many messages are on their way in, over all and of each caller.

gRPC takes a message in whole as soon as it is asked to read one, and holds what has come of it for as long as the
rest does not. So nothing is read before there is room for it: unary calls are served as streams of one message.
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
"""Of unary calls on their way in at once, of each caller a quarter; the others wait for their turn."""
MAX_WAITING = 256
"""Unary calls of one caller whose message has not come."""
MESSAGE_TIMEOUT_S = 10.0
"""For the message of a unary call, its turn included. Users' requests have their own: see `gateway.api.grpc_api`."""
MAX_DELIVERING = 256
"""Streams of proposals to a target, one of each draft; a quarter of them from one host. Each holds up to one message of
the largest size, so that twice as many drafts may hold twice the memory of a target.
"""
MAX_LOOKING = 16
"""Calls that watch health or ask for the services, of each caller a quarter."""
RETRY_S = 1.0
"""Seconds after which a caller that was refused is told to try again. Doubled, it waits so much longer."""

_END: Any = getattr(grpc.aio, "EOF")  # noqa: B009  # the stubs lack it


class CallLimits:
    """At most `total` at once, `share` of each caller; one more is refused. One event loop, so no lock."""

    def __init__(self, what: str, total: int, share: int) -> None:
        self._what = what
        self._total = total
        self._share = share
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """Raises Overloaded."""
        num, own = self._taken.total(), self._taken[caller]
        if num >= self._total or own >= self._share:
            raise Overloaded(
                f"{num} {self._what}, {own} of this caller; at most {self._total} and {self._share} are allowed; "
                "try again later",
                retry_after_s=RETRY_S,
            )
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]


class CallTurns:
    """At most `total` at once, `share` of each caller; further ones wait, each behind its caller's own."""

    def __init__(self, total: int, share: int, waiting: CallLimits) -> None:
        """waiting: room for those that have or await a turn."""
        self._all = asyncio.Semaphore(total)
        self._share = share
        self._waiting = waiting
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def one(self, caller: str) -> AsyncIterator[None]:
        """Raises Overloaded when too many wait."""
        own = self._of.get(caller) or asyncio.Semaphore(self._share)
        self._of[caller] = own
        with self._waiting.one(caller):
            async with own, self._all:
                yield


def host_of(context: Any) -> str:
    """Of a call's peer: its address without the port."""
    return str(context.peer()).rpartition(":")[0]


def _caller_of(context: Any) -> str:
    """Its host, and the names of its certificate where it has one: parts on one machine do not stand for each other."""
    names = sorted(uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ()))
    return " ".join([host_of(context), *names])


class RoomInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """For every call of a server, before anything of it is read."""

    def __init__(self) -> None:
        looking = CallLimits("calls watch health or ask for services", MAX_LOOKING, MAX_LOOKING // 4)
        delivering = CallLimits("streams bring proposals", MAX_DELIVERING, MAX_DELIVERING // 4)
        self._places = {
            "/grpc.health.v1.Health/Watch": looking,
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": looking,
            "/outrider.v1.TargetService/Deliver": delivering,
        }
        waiting = CallLimits("calls await their message", 4 * MAX_WAITING, MAX_WAITING)
        self._turns = CallTurns(MAX_MESSAGES, MAX_MESSAGES // 4, waiting)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        places = self._places.get(str(handler_call_details.method))
        if not handler.request_streaming:
            handler = _read_late(handler, self._turns)
        return handler if places is None else _placed(handler, places)


def _read_late(handler: Any, turns: CallTurns) -> Any:
    """The same unary call as a stream, whose one message is read when it has a turn."""
    inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def answer(_: object, context: Any) -> Any:
        try:
            data = await _message(context, turns)
        except OutriderError as error:
            return await abort(context, error)
        return await inner(data, context)

    async def answers(_: object, context: Any) -> AsyncIterator[Any]:
        try:
            data = await _message(context, turns)
        except OutriderError as error:
            await abort(context, error)
        async for response in inner(data, context):
            yield response

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    serve = answers if inspect.isasyncgenfunction(inner) else answer
    return make(serve, handler.request_deserializer, handler.response_serializer)


async def _message(context: Any, turns: CallTurns) -> Any:
    """Raises Overloaded, RequestTooSlow and InvalidRequest."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S), turns.one(_caller_of(context)):
            data = await context.read()
    except TimeoutError:
        raise RequestTooSlow(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s; send it faster") from None
    if data is _END:
        raise InvalidRequest("the call ended without its message")
    return data


def _placed(handler: Any, places: CallLimits) -> Any:
    kind = "stream_stream" if handler.response_streaming else "stream_unary"
    inner = getattr(handler, kind)

    async def answer(messages: Any, context: Any) -> Any:
        try:
            with places.one(_caller_of(context)):
                return await inner(messages, context)
        except Overloaded as error:
            return await abort(context, error)

    async def answers(messages: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with places.one(_caller_of(context)):
                async for message in inner(messages, context):
                    yield message
        except Overloaded as error:
            await abort(context, error)

    return handler._replace(**{kind: answers if inspect.isasyncgenfunction(inner) else answer})
