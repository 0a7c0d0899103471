"""How often requests may be started again. Finagle's: a share of the requests on top of a floor, so that retries never
make a bad moment worse. Pure, of the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

REQUESTS_PER_RETRY = 5
"""New requests that pay for a retry: at most 20 %. Twice as many allow half the retries."""
RESERVE_S = 10.0
"""Seconds of the floor that an unused budget holds. Twice as many allow a burst of twice as many retries."""


class RetryBudget:
    """A token bucket. Every request puts one in, every retry takes REQUESTS_PER_RETRY; `floor_per_s` retries a second
    are free besides.
    """

    def __init__(self, floor_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.floor_per_s = floor_per_s
        self._most = REQUESTS_PER_RETRY * floor_per_s * RESERVE_S
        self._clock = clock
        self._balance = self._most
        self._seen_s = clock()

    def request(self) -> None:
        self._refill(1.0)

    def take(self) -> bool:
        """True when a retry may go now."""
        self._refill(0.0)
        if self._balance < REQUESTS_PER_RETRY:
            return False
        self._balance -= REQUESTS_PER_RETRY
        return True

    def _refill(self, extra: float) -> None:
        now = self._clock()
        flow = (now - self._seen_s) * self.floor_per_s * REQUESTS_PER_RETRY
        self._balance, self._seen_s = min(self._most, self._balance + flow + extra), now
