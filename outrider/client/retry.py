"""Retries of failed calls: `RetryPolicy` decides whether and when, two functions make the attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from outrider.client.transport import Transport
from outrider.v1.gateway_pb2 import GenerateRequest, GenerateResponse
from outrider.wire.errors import ConfigError, DeadlineExceeded, OutriderError

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is tried again, and how long the client waits before each further attempt.

    A call is tried again after an error that is `retryable` (Unavailable, Overloaded), if no part of the reply has
    arrived. Wait number n, from 0, is the gateway's `retry-after` plus a random time from [0, min(max_backoff_s,
    backoff_s * 2**n)].
    """

    retries: int = 2
    """Maximum number of attempts after the first one; 0 = a call is never tried again."""
    backoff_s: float = 0.1
    """Upper bound, in seconds, of the random time of the first wait, to which a gateway's `retry-after` is added. The
    bound doubles with each further wait."""
    max_backoff_s: float = 2.0
    """Upper bound, in seconds, of the random time of any wait, to which a gateway's `retry-after` is added."""
    max_wait_s: float = 30.0
    """Longest `retry-after` of a gateway, in seconds, that the client waits for. If a gateway asks for more, the error
    is raised at once."""

    def __post_init__(self) -> None:
        for name in ("retries", "backoff_s", "max_backoff_s", "max_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be 0 or more", param=name)

    def delay_s(self, error: OutriderError, attempt: int) -> float | None:
        """Return the seconds to wait after attempt `attempt` (from 0) failed with `error`; None = do not retry."""
        if not error.retryable or attempt >= self.retries:
            return None
        retry_after_s = error.retry_after_s or 0.0
        if retry_after_s > self.max_wait_s:
            return None
        exponent = min(attempt, 32)  # far past the cap; 2**attempt must not overflow
        return retry_after_s + random.uniform(0.0, min(self.max_backoff_s, self.backoff_s * 2.0**exponent))


class Deadline:
    """Deadline of one call, all attempts included: `timeout_s` seconds after its creation; None = no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end_s: float | None = None
        if timeout_s is not None:
            self._end_s = asyncio.get_running_loop().time() + timeout_s

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline; None = there is no deadline. Raises DeadlineExceeded after it."""
        if self._end_s is None:
            return None
        remaining_s = self._end_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return remaining_s


async def _pause(policy: RetryPolicy, deadline: Deadline, error: OutriderError, attempt: int) -> None:
    # Raises `error` where there is no further attempt, or no time for it.
    delay_s = policy.delay_s(error, attempt)
    if delay_s is None:
        raise error
    remaining_s = deadline.remaining_s()
    if remaining_s is not None and delay_s >= remaining_s:
        raise error
    await asyncio.sleep(delay_s)


async def call_with_retries(
    call: Callable[[float | None], Awaitable[Reply]], timeout_s: float | None, policy: RetryPolicy
) -> Reply:
    """Return the result of `call(remaining_s)`, which is tried again as `policy` allows. Only for calls without side
    effects.

    `remaining_s` is the number of seconds until the deadline. timeout_s: deadline in seconds for all attempts together;
    None = no deadline. Raises the last attempt's error, or DeadlineExceeded.
    """
    deadline = Deadline(timeout_s)
    for attempt in count():
        try:
            return await call(deadline.remaining_s())
        except OutriderError as error:
            await _pause(policy, deadline, error, attempt)
    raise AssertionError("count ended")


async def generate_with_retries(
    transport: Transport, request: GenerateRequest, timeout_s: float | None, policy: RetryPolicy
) -> AsyncGenerator[GenerateResponse, None]:
    """Yield the messages of a Generate call. The call is tried again as `policy` allows, but only while no message has
    arrived: a further attempt would repeat or change text that was already yielded.

    timeout_s: deadline in seconds for all attempts together; None = no deadline.
    """
    deadline = Deadline(timeout_s)
    for attempt in count():
        started = False
        try:
            async with aclosing(transport.generate(request, deadline.remaining_s())) as responses:
                async for response in responses:
                    started = True
                    yield response
            return
        except OutriderError as error:
            if started:
                raise
            await _pause(policy, deadline, error, attempt)
