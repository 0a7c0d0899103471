"""Limits how often requests are started again, so that retries never make an overload worse. Pure.

It works like Finagle's RetryBudget: retries may be a share of the new requests, on top of a fixed rate. Use it from the
event loop's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CHOICES_PER_RETRY = 5
"""Number of new requests that pay for one retry. Besides the retries that `floor_per_s` allows, there are thus at most
20 % as many retries as requests."""
RESERVE_S = 10.0
"""Number of seconds whose retries, at `floor_per_s` a second, a full budget allows at once."""


class RetryBudget:
    """A budget of retries, kept as a token bucket: each request adds one token, each retry takes CHOICES_PER_RETRY.

    In addition, the bucket gains tokens for `floor_per_s` retries every second.

        # a floor of 10 a second: the full bucket holds 5 * 10 * 10 = 500 tokens, which are 100 retries at once
    """

    def __init__(self, floor_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.floor_per_s = floor_per_s
        self._max_balance = CHOICES_PER_RETRY * floor_per_s * RESERVE_S
        self._clock = clock
        self._balance = self._max_balance
        self._filled_s = clock()

    def note_choice(self) -> None:
        """Record a new request, which adds one token to the bucket."""
        self._refill(1.0)

    def use_retry(self) -> bool:
        """Pay for a retry with CHOICES_PER_RETRY tokens. Return False, without paying, if the bucket has too few."""
        self._refill(0.0)
        if self._balance < CHOICES_PER_RETRY:
            return False
        self._balance -= CHOICES_PER_RETRY
        return True

    def _refill(self, extra: float) -> None:
        now = self._clock()
        flow = (now - self._filled_s) * self.floor_per_s * CHOICES_PER_RETRY
        self._balance = min(self._max_balance, self._balance + flow + extra)
        self._filled_s = now
