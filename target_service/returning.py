"""Plain slots that were just answered come back within a gateway's round trip: one step can serve them all again.

Without a little patience the first to come back has a step of its own, the others find it under way and are served by
the next: from then on there are two half-full steps where one full one would cost hardly more, and a prompt's piece
slips in where all would have been ready a moment later. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.engine.scheduler import SlotKey

PATIENCE = 0.5
"""Of a step's time: how long the next one is held back at most. What it saves is a step for those who come later, which
takes about as long as one for all."""
_WEIGHT = 0.2
"""Of a new measurement in the running mean."""


class Returning:
    """Who is waited for, and whether that pays: with a gateway too far away for it, nobody is."""

    def __init__(self) -> None:
        self._awaited: set[SlotKey] = set()
        self._answered_s = 0.0
        self._limit_s = 0.0
        self._slowest_s = 0.0  # of this round, so far
        self._usual_s = 0.0

    def answered(self, keys: Iterable[SlotKey], now: float, step_s: float) -> None:
        """The verdicts of a step that took `step_s` are on their way; `keys` will go on with plain steps."""
        self._end_round(now)
        self._awaited = set(keys)
        self._answered_s, self._limit_s, self._slowest_s = now, PATIENCE * step_s, 0.0

    def back(self, key: SlotKey, arrived_s: float) -> None:
        """Its next verify arrived then; times are monotonic, in seconds."""
        if key in self._awaited:
            self._awaited.discard(key)
            self._slowest_s = max(self._slowest_s, arrived_s - self._answered_s)

    def gone(self, key: SlotKey) -> None:
        self._awaited.discard(key)

    def owner_gone(self, owner: int) -> None:
        self._awaited = {key for key in self._awaited if key[0] != owner}

    def wait_until(self, now: float) -> float | None:
        """Until when the next step is to be held back; None when it is not."""
        until = self._answered_s + self._limit_s
        return until if self._awaited and self._usual_s <= self._limit_s and now < until else None

    def _end_round(self, now: float) -> None:
        if self._awaited:  # they are late, by how much is not known
            self._slowest_s = min(now - self._answered_s, 2 * self._limit_s)
        if self._slowest_s:
            self._usual_s += _WEIGHT * (self._slowest_s - self._usual_s)
