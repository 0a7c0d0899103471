"""Decides when a part of the system is started again. For `supervisor.py`; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEADY_S = 30.0
"""Seconds for which a part must be ready before it ends, or else its life counts as short. After too many short lives
in a row the part is not started again: a fault probably ends it every time."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""DELAYS_S[i]: seconds from a part's end to its next start, if `Restarts.num_short` is i + 1. If num_short is larger
than the number of delays, the part is not started again."""


@dataclass(slots=True)
class Restarts:
    """Decides when one part of the system is started again. All times are monotonic, in seconds."""

    start: Callable[[], object]
    """Function that starts the part, and returns before the part is ready."""
    num_short: int = 0
    """Number of lives of the part since the last life of at least STEADY_S, which counts as 1; 0 = the part has not
    ended yet."""
    due_at_s: float | None = None
    """Time at which the part is to be started again; None = it runs, or it will not be started again."""
    _ready_at_s: float | None = None

    def ready(self, now_s: float) -> None:
        """Record that the part became ready at time `now_s`."""
        self._ready_at_s = now_s

    def ended(self, now_s: float) -> bool:
        """Record that the part ended at time `now_s`. Return whether it will be started again."""
        self.num_short += 1
        if self._ready_at_s is not None and now_s - self._ready_at_s >= STEADY_S:
            self.num_short = 1
        self._ready_at_s = None
        if self.num_short > len(DELAYS_S):
            return False
        self.due_at_s = now_s + DELAYS_S[self.num_short - 1]
        return True

    def start_if_due(self, now_s: float) -> None:
        """Start the part if the time of its next start has come."""
        if self.due_at_s is not None and now_s >= self.due_at_s:
            self.due_at_s = None
            self.start()
