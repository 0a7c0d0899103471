"""How long a new answer would wait for a place, from how long answers hold theirs. Pure; no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEMORY = 32
"""Answers that the mean looks back on."""


class QueueEstimate:
    """Of one queue before `num_places` places, first come, first served."""

    def __init__(self, num_places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._clock = clock
        self._mean_s = 0.0
        self._num_ended = 0
        self._num_running = 0
        self._sum_began_s = 0.0

    @contextmanager
    def served(self) -> Iterator[None]:
        """While an answer holds a place."""
        began_s = self._clock()
        self._num_running += 1
        self._sum_began_s += began_s
        try:
            yield
        finally:
            self._num_running -= 1
            self._sum_began_s = self._sum_began_s - began_s if self._num_running else 0.0
            self._num_ended += 1
            self._mean_s += (self._clock() - began_s - self._mean_s) / min(self._num_ended, MEMORY)

    def service_s(self) -> float:
        """Mean time that an answer holds its place; 0 before the first. Those that run for longer count by their age:
        when all stands still, nothing ends that could say so.
        """
        if not self._num_running:
            return self._mean_s
        return max(self._mean_s, self._clock() - self._sum_began_s / self._num_running)

    def wait_s(self, num_ahead: int) -> float:
        """Until an answer gets a place that has `num_ahead` running or waiting before it."""
        turns = max(0, num_ahead - self.num_places + 1)
        return turns * self.service_s() / max(1, self.num_places)
