"""Whether a new answer may wait for a place, so that those who are let in keep their pace. Pure; no I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BURST_S = 0.25
"""What comes within this of an idle moment is a burst, which the whole queue is for: what one caller sends at once, and
little of what many send all the time."""
CALM_S = 1.0
"""Overload is over when nobody has found all places taken for so long."""


class QueueLimit:
    """Of one queue. A short one evens out arrivals. Once it has grown longer than `most_wait_s`, more comes than can be
    served, and waiting helps nobody: until that is over, only who finds a free place is let in.
    """

    def __init__(self, most_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._idle_s = self._full_s = -math.inf
        self._overloaded = False

    def admits(self, num_places: int, num_admitted: int, wait_s: float) -> bool:
        """Whether one more may come beside those that run or wait, when it is expected to wait for `wait_s`. Who finds
        nobody waiting may, unless there is overload: with few places a single turn may be longer than the limit.
        """
        now_s = self._clock()
        if num_admitted <= num_places // 8:
            self._idle_s = now_s
        if now_s - self._full_s >= CALM_S:
            self._overloaded = False
        if num_admitted < num_places:
            return True
        self._full_s = now_s
        if now_s - self._idle_s < BURST_S:
            return True
        self._overloaded |= num_admitted > num_places and wait_s > self._most_wait_s
        return not self._overloaded
