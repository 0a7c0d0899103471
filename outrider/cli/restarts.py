"""When a part of a running system that ended is started again: later each time, and no more once it keeps ending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEADY_S = 30.0
"""A life that was ready for this long ended by accident; a shorter one may end so every time."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each start, by how many short lives in a row there were."""


@dataclass(slots=True)
class Restarts:
    """Of one part. Times are those of one clock, in seconds."""

    start: Callable[[], object]
    """Returns at once; the part says by itself when it is ready."""
    num_short: int = 0
    """Short lives in a row."""
    due_at_s: float | None = None
    """When it is to be started; None while it runs, and once it is given up."""
    _ready_at_s: float | None = None

    def ready(self, now_s: float) -> None:
        self._ready_at_s = now_s

    def ended(self, now_s: float) -> bool:
        """Whether it is to be started again."""
        was_steady = self._ready_at_s is not None and now_s - self._ready_at_s >= STEADY_S
        self.num_short = 1 if was_steady else self.num_short + 1
        self._ready_at_s = None
        if self.num_short > len(DELAYS_S):
            return False
        self.due_at_s = now_s + DELAYS_S[self.num_short - 1]
        return True

    def start_if_due(self, now_s: float) -> None:
        if self.due_at_s is not None and now_s >= self.due_at_s:
            self.due_at_s = None
            self.start()
