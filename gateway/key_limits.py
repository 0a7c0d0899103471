"""What one API key may still do: requests and tokens a minute by token buckets, answers at once by a count. No I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.wire.api_keys import ApiKey
from outrider.wire.errors import InvalidRequest, RateLimited

MINUTE_S = 60.0
ROUNDING = 1e-3
"""Tokens or requests: what clocks and sums may be off."""
BUSY_RETRY_S = 1.0
"""When to come back to a key that has all its answers running: nobody knows when one ends."""

Clock = Callable[[], float]


class Bucket:
    """Holds what a minute allows, and fills evenly. It may go below empty: then the debt is waited for."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 for now. More than a minute allows waits for a full bucket."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_s) * self.per_minute / MINUTE_S)
        self._filled_s = now
        missing = min(amount, self.per_minute) - self._level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Negative gives back."""
        self._level -= amount


class KeyLimits:
    """The state of one key. Raises RateLimited with the seconds after which the same request passes."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._requests = _bucket(key.requests_per_minute, clock)
        self._tokens = _bucket(key.tokens_per_minute, clock)
        self.num_answers = 0
        """Running or waiting."""

    def change(self, key: ApiKey) -> None:
        """The same key with other limits. A rate that stays keeps its level."""
        if key.requests_per_minute != self.key.requests_per_minute:
            self._requests = _bucket(key.requests_per_minute, self._clock)
        if key.tokens_per_minute != self.key.tokens_per_minute:
            self._tokens = _bucket(key.tokens_per_minute, self._clock)
        self.key = key

    def take_request(self) -> None:
        if self._requests is None:
            return
        self._refuse("requests_per_minute", self._requests, self._requests.wait_s(1))
        self._requests.take(1)

    @contextmanager
    def answers(self, count: int, param: str) -> Iterator[None]:
        """Holds `count` of the answers at once. Raises InvalidRequest naming `param` when that can never be."""
        most = self.key.max_concurrent
        if most is not None and count > most:
            raise InvalidRequest(
                f"the request asks for {count} answers at once, the API key {self.key.name!r} may have {most} "
                "(max_concurrent); split it",
                param=param,
            )
        if most is not None and self.num_answers + count > most:
            raise RateLimited(
                f"the API key {self.key.name!r} has {self.num_answers} answers running or waiting, may have {most} "
                f"(max_concurrent), and asks for {count} more; try again when one has ended",
                param="max_concurrent",
                retry_after_s=BUSY_RETRY_S,
            )
        self.num_answers += count
        try:
            yield
        finally:
            self.num_answers -= count

    def charge(self, num_tokens: int) -> None:
        """What a request may cost, before it begins. `settle` corrects it."""
        if self._tokens is None:
            return
        self._refuse("tokens_per_minute", self._tokens, self._tokens.wait_s(num_tokens))
        self._tokens.take(num_tokens)

    def settle(self, num_charged: int, num_used: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_used - num_charged)

    def _refuse(self, limit: str, bucket: Bucket, wait_s: float) -> None:
        if wait_s > 0.0:
            wait_s = _rounded_up(wait_s)
            raise RateLimited(
                f"the API key {self.key.name!r} is over its {limit} of {bucket.per_minute}; try again in {wait_s:g} s",
                param=limit,
                retry_after_s=wait_s,
            )


def _rounded_up(wait_s: float) -> float:
    """To the digits that trailers carry, and never down: who waits as told passes."""
    unit = 10.0 ** max(-3, math.floor(math.log10(wait_s)) - 4)
    return math.ceil(wait_s / unit) * unit


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)
