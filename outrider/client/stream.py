"""`RoundStream`, an iterator of the rounds of a running request, and `collect`, which joins rounds to a completion."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType

from outrider.client.parse import parse_round
from outrider.client.types import Choice, Completion, Round, Token
from outrider.v1.gateway_pb2 import GenerateResponse
from outrider.wire.errors import OutriderError


class RoundStream(AsyncIterator[Round]):
    """Asynchronous iterator of the rounds of a request, those of all choices interleaved. Only one task may read it.

    Use it with `async with` and `async for`. Leaving the `async with` block cancels the call if it still runs.
    """

    def __init__(self, responses: AsyncGenerator[GenerateResponse, None]) -> None:
        self._responses = responses
        self._read: asyncio.Task[GenerateResponse | None] | None = None
        self._closed = asyncio.Event()

    async def __aenter__(self) -> RoundStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Round:
        """Wait for the next round and return it. Raises OutriderError if the call fails, and StopAsyncIteration at the
        end of the call and after `aclose`.
        """
        if self._closed.is_set():
            raise StopAsyncIteration
        # A task of its own: `aclose` from elsewhere must be able to end a read, which a generator alone refuses.
        self._read = asyncio.ensure_future(self._next_response())
        try:
            response = await self._read
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise StopAsyncIteration from None
            raise
        if response is None:
            raise StopAsyncIteration
        return parse_round(response)

    async def _next_response(self) -> GenerateResponse | None:
        return await anext(self._responses, None)

    async def aclose(self) -> None:
        """Cancel the call if it still runs. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._read is not None:
            self._read.cancel()
            await asyncio.wait([self._read])
        await self._responses.aclose()


async def collect(stream: RoundStream) -> Completion:
    """Read a stream to its end and return all choices as a completion. Raises OutriderError if the stream ends before
    every choice has finished.
    """
    rounds: dict[int, list[Round]] = defaultdict(list)
    async with stream:
        async for round_ in stream:
            rounds[round_.choice].append(round_)
    if not rounds:
        raise OutriderError("the gateway ended the call without an answer")
    choices = tuple(_choice(index, rounds[index]) for index in sorted(rounds))
    first_round = rounds[choices[0].index][0]
    return Completion(request_id=first_round.request_id, choices=choices)


def _choice(index: int, rounds: list[Round]) -> Choice:
    last = rounds[-1]
    if last.finish_reason is None or last.usage is None:
        raise OutriderError(f"the gateway ended the call before choice {index} had finished")
    text = ""
    tokens = list[Token]()
    for round_ in rounds:
        text += round_.text_delta
        tokens += round_.tokens
    return Choice(
        index=index,
        text=text,
        tokens=tuple(tokens),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        score=last.score,
    )
