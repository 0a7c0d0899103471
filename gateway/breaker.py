"""When a worker that fails is left alone, and how often requests may be started again. Pure, one owner: the event loop.

A breaker is Finagle's failure accrual: failures in a row open it, and a probe, one request, closes it again. The budget
is Finagle's, too: a share of the requests on top of a floor, so that retries never make a bad moment worse.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import Enum

MAX_FAILURES = 3
"""In a row."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
"""The pause before a probe doubles with every probe that fails."""

REQUESTS_PER_RETRY = 5
"""New requests that pay for a retry: at most 20 %."""
RESERVE_S = 10.0
"""An unused budget holds the floor of so many seconds."""


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Of one worker. Closed: requests go there. Open: one request may try after each pause."""

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`max_failures` in a row open it. `jitter` is in [0, 1): a pause lasts from its half to its whole."""
        self._max_failures = max_failures
        self._clock = clock
        self._jitter = jitter
        self._state = _State.CLOSED
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._paused_s = self._probe_from_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._state is not _State.CLOSED

    @property
    def allows(self) -> bool:
        """A request may go there now."""
        return self._state is _State.CLOSED or self._clock() >= self._probe_from_s

    def allows_after(self, most_s: float) -> bool:
        """As `allows`, when there is nobody else: no pause is longer than `most_s` then."""
        return self.allows or self._clock() >= self._paused_s + most_s

    def begin(self) -> None:
        """A request goes there. While open it is the probe: the next one waits, whether this one is ever heard of."""
        if self.is_open:
            self._pause(_State.PROBING)

    def succeeded(self) -> None:
        if self._num_failures or self.is_open:
            self._state, self._num_failures, self._pause_s = _State.CLOSED, 0, FIRST_PAUSE_S

    def failed(self) -> None:
        """Failures of requests that were under way when it opened change nothing."""
        if self._state is _State.CLOSED:
            self._num_failures += 1
            if self._num_failures >= self._max_failures:
                self.trip()
        elif self._state is _State.PROBING:
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._pause(_State.OPEN)

    def trip(self) -> None:
        """Open at once, or fail the probe: this failure needs no second."""
        if self._state is _State.CLOSED:
            self._pause(_State.OPEN)
        else:
            self.failed()

    def restarted(self) -> None:
        """The worker began a new life: it may be probed now."""
        self._probe_from_s = self._clock()

    def _pause(self, state: _State) -> None:
        self._state, self._paused_s = state, self._clock()
        self._probe_from_s = self._paused_s + self._pause_s * (0.5 + 0.5 * self._jitter())


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
