"""Decides when a part of the system is started again. For `supervisor.py`; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEADY_S = 30.0
"""Seconds of being ready after which an end counts as an accident; a part that ends sooner may end so every time."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each start, by the number of short lives in a row."""


@dataclass(slots=True)
class Restarts:
    """When one part is started again. Times are of one monotonic clock, in seconds."""

    start: Callable[[], object]
    """Starts the part and returns at once, before the part is ready."""
    num_short: int = 0
    """Short lives in a row."""
    due_at_s: float | None = None
    """Time of the next start; None while the part runs, and once it is given up."""
    _ready_at_s: float | None = None

    def ready(self, now_s: float) -> None:
        """Record that the part is ready."""
        self._ready_at_s = now_s

    def ended(self, now_s: float) -> bool:
        """Record that the part has ended. Return whether it is to be started again."""
        self.num_short += 1
        if self._ready_at_s is not None and now_s - self._ready_at_s >= STEADY_S:
            self.num_short = 1
        self._ready_at_s = None
        if self.num_short > len(DELAYS_S):
            return False
        self.due_at_s = now_s + DELAYS_S[self.num_short - 1]
        return True

    def start_if_due(self, now_s: float) -> None:
        """Start the part if its time has come."""
        if self.due_at_s is not None and now_s >= self.due_at_s:
            self.due_at_s = None
            self.start()
