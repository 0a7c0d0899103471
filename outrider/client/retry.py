"""When a call may be made again, and after how long."""

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
    """Which calls are made again: those whose error says so (Unavailable, Overloaded), before anything was answered.

    The n-th wait is drawn from [0, min(max_backoff_s, backoff_s * 2**n)], after the gateway's own `retry-after`.
    """

    retries: int = 2
    """Further attempts after the first; 0 = none."""
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_wait_s: float = 30.0
    """Longest wait that a gateway may ask for, seconds; when it asks for more, the error is raised at once."""

    def __post_init__(self) -> None:
        for name in ("retries", "backoff_s", "max_backoff_s", "max_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be 0 or more", param=name)

    def delay_s(self, error: OutriderError, attempt: int) -> float | None:
        """Return the seconds to wait after `attempt` (0 is the first), or None when there must be no other."""
        if not error.retryable or attempt >= self.retries:
            return None
        asked = error.retry_after_s or 0.0
        if asked > self.max_wait_s:
            return None
        exponent = min(attempt, 32)  # far past the cap; 2**attempt must not overflow
        return asked + random.uniform(0.0, min(self.max_backoff_s, self.backoff_s * 2.0**exponent))


class Deadline:
    """When one call with all its attempts is given up. `timeout_s` None = never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def remaining_s(self) -> float | None:
        """Return the seconds left, or None without a deadline. Raises DeadlineExceeded when none are left."""
        if self._end is None:
            return None
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return left


async def _pause(policy: RetryPolicy, deadline: Deadline, error: OutriderError, attempt: int) -> None:
    """Sleep before the next attempt; raise `error` when there is none, or no time for it."""
    delay_s = policy.delay_s(error, attempt)
    left_s = deadline.remaining_s() if delay_s is not None else None
    if delay_s is None or (left_s is not None and delay_s >= left_s):
        raise error
    await asyncio.sleep(delay_s)


async def call_with_retries(
    call: Callable[[float | None], Awaitable[Reply]], timeout_s: float | None, policy: RetryPolicy
) -> Reply:
    """Repeat `call(remaining_s)` until it answers. For calls without effect."""
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
    """Generate, with new attempts until the first message: a later one would repeat text, or change it."""
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
