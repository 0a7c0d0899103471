"""Decides when a part of the system is started again. For `supervisor.py`; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEADY_S = 30.0
"""Seconds that a process must have been ready when it ends; after less, its life counts as short. After too many short
lives in a row it is not started again, because a fault probably ends it every time."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""DELAYS_S[i]: seconds from end number i + 1 in a row of a process to its next start. The count of ends begins again at
an end after STEADY_S of being ready. After more ends than there are delays, the process is not started again."""


@dataclass(slots=True)
class Restarts:
    """Decides when a process of the system is started again. All times are monotonic, in seconds."""

    start: Callable[[], object]
    """Function that starts the process, and returns before the process is ready."""
    num_short: int = 0
    """Number of the process's ends in a row. An end after at least STEADY_S of being ready is number 1 again. 0 = it
    has not ended yet."""
    due_at_s: float | None = None
    """Monotonic time, in seconds, at which an ended process is to be started again; None = no start is due."""
    _ready_at_s: float | None = None

    def ready(self, now_s: float) -> None:
        """Record that the process became ready at time `now_s`."""
        self._ready_at_s = now_s

    def ended(self, now_s: float) -> bool:
        """Record that the process ended at time `now_s`. Return whether it will be started again."""
        self.num_short += 1
        if self._ready_at_s is not None and now_s - self._ready_at_s >= STEADY_S:
            self.num_short = 1
        self._ready_at_s = None
        if self.num_short > len(DELAYS_S):
            return False
        self.due_at_s = now_s + DELAYS_S[self.num_short - 1]
        return True

    def start_if_due(self, now_s: float) -> None:
        """Start the process if the time of its next start has come."""
        if self.due_at_s is not None and now_s >= self.due_at_s:
            self.due_at_s = None
            self.start()
