"""How long engine steps take: what says that a worker is busy, and when one that is silent must be hanging. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

MEMORY_S = 300.0
"""The longest step is remembered for this to twice this."""


class StepTimes:
    """Of one engine thread, which is the only one to write. Read from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_steps = 0
        """Steps that did something: a sign of life."""
        self.busy_s = 0.0
        """In all of them."""
        self._longest_s = 0.0
        self._longest_before_s = 0.0
        self._since_s = clock()
        self._began_s: float | None = None

    def begin(self) -> None:
        """The engine turns to its next step, or to a job."""
        self._began_s = self._clock()

    def rest(self) -> None:
        """It waits for work."""
        self._began_s = None

    def add(self, seconds: float) -> None:
        """A step has ended."""
        now = self._clock()
        if now - self._since_s >= MEMORY_S:
            self._longest_before_s = 0.0 if now - self._since_s >= 2 * MEMORY_S else self._longest_s
            self._longest_s, self._since_s = 0.0, now
        self.num_steps += 1
        self.busy_s += seconds
        self._longest_s = max(self._longest_s, seconds)

    @property
    def longest_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return max(self._longest_s, self._longest_before_s)

    @property
    def current_s(self) -> float:
        """How long it has been at what it does now; 0 while it waits for work."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s
