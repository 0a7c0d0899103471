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
_WEIGHT = 0.1
"""Of a new measurement in the running mean."""


class Returning:
    """Who is waited for, and whether that pays: with a gateway too far away for it, nobody is."""

    def __init__(self) -> None:
        self._answered: dict[SlotKey, float] = {}  # and not back yet: since when
        self._awaited: set[SlotKey] = set()  # of the last step
        self._last_s = 0.0  # when that ended
        self._limit_s = 0.0
        self._usual_s = 0.0  # from an answer to the next verify

    def answered(self, keys: Iterable[SlotKey], now: float, step_s: float | None) -> None:
        """A step's verdicts are on their way; `keys` will go on with plain steps.

        step_s: what it took; None for a step that also fed prompts, which says nothing of the next one.
        """
        self._awaited = set(keys)
        self._answered.update(dict.fromkeys(self._awaited, now))
        self._last_s = now
        if step_s is not None:
            self._limit_s = PATIENCE * step_s

    def back(self, key: SlotKey, arrived_s: float) -> None:
        """Its next verify arrived then, perhaps beside a later step; times are monotonic, in seconds."""
        self._awaited.discard(key)
        answered_s = self._answered.pop(key, None)
        if answered_s is not None:
            took_s = min(arrived_s - answered_s, 2 * self._limit_s)
            self._usual_s += _WEIGHT * (took_s - self._usual_s)

    def gone(self, key: SlotKey) -> None:
        self._awaited.discard(key)
        self._answered.pop(key, None)

    def owner_gone(self, owner: int) -> None:
        for key in [key for key in self._answered if key[0] == owner]:
            self.gone(key)

    def wait_until(self, now: float) -> float | None:
        """Until when the next step is to be held back; None when it is not."""
        until = self._last_s + self._limit_s
        return until if self._awaited and self._usual_s <= self._limit_s and now < until else None
