"""Streams of requests whose messages may be no messages: the call then ends in INVALID_ARGUMENT, whoever serves it.

gRPC alone would answer UNKNOWN and blame the server. Called by `rpc.ErrorInterceptor`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.wire.errors import InvalidRequest, OutriderError

Parse = Callable[[Any, bytes], Any]
Abort = Callable[[Any, OutriderError], Any]


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
    """The same handler, of a method with a stream of requests; errors of the tree become its status."""
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
