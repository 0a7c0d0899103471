"""Limits how often requests are started again, so that retries never make an overload worse. Pure.

It is Finagle's budget: a share of the requests on top of a floor. Use it from the event loop's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

REQUESTS_PER_RETRY = 5
"""Number of new requests that pay for one retry: at most 20 %."""
RESERVE_S = 10.0
"""Seconds of the floor that an unused budget holds."""


class RetryBudget:
    """A token bucket: each request adds one token, each retry takes REQUESTS_PER_RETRY.

    `floor_per_s` retries a second are free in addition.

        # a floor of 10 a second: the full bucket holds 5 * 10 * 10 = 500 tokens, which are 100 retries at once
    """

    def __init__(self, floor_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.floor_per_s = floor_per_s
        self._max_balance = REQUESTS_PER_RETRY * floor_per_s * RESERVE_S
        self._clock = clock
        self._balance = self._max_balance
        self._filled_s = clock()

    def request(self) -> None:
        """Add the token of a new request."""
        self._refill(1.0)

    def take(self) -> bool:
        """Take the tokens of a retry. Return False if there are too few."""
        self._refill(0.0)
        if self._balance < REQUESTS_PER_RETRY:
            return False
        self._balance -= REQUESTS_PER_RETRY
        return True

    def _refill(self, extra: float) -> None:
        now = self._clock()
        flow = (now - self._filled_s) * self.floor_per_s * REQUESTS_PER_RETRY
        self._balance = min(self._max_balance, self._balance + flow + extra)
        self._filled_s = now
