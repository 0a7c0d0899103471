"""Shares a worker's steps between callers, by weight, where one of them would slow another by more than its part.

Alone, a caller would gain so much a second: by a step of its own rows alone. Beside others it is to gain its part of
that, its weight over that of all who are here: of two alike each at least half. Where the step that gains the most a
second, over all, leaves somebody less, it is bounded: it is to take no longer than lets everybody whose rows are all in
it have their part, and its rows are dealt out one after the other, to whom least was given over its weight. What is
left over waits for the next step. A step of more rows takes no longer than steps of fewer rows that have as many
together, so there is room for the part of all.

How many rows that are follows from the bounded steps before, by what they took. Of the caller by whom steps are
bounded, one in ALONE_EVERY is taken alone, which says how long that takes now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.scheduling import VirtualTokens

ALONE_EVERY = 4
"""Bounded steps of which one is the bounding caller's alone. Doubling it halves what that costs the others, and follows
the machine half as fast."""
_WEIGHT = 0.25
"""Weight of a step in what is learnt. Doubling it follows twice as fast, and noise twice as much."""
_OUTLIER = 4.0
"""Most times the mean that a step counts as: the machine may have had other things to do. Doubling it doubles what one
disturbed step adds."""

Item = TypeVar("Item")


class Unit(NamedTuple, Generic[Item]):
    """What is dealt out at once."""

    item: Item
    num_rows: int


class Alone(NamedTuple, Generic[Item]):
    """The step that a caller would take alone."""

    gain: float
    """Tokens that are expected of it."""
    units: Sequence[Unit[Item]]
    """In the order in which they are dealt."""

    @property
    def num_rows(self) -> int:
        return sum(unit.num_rows for unit in self.units)


class CallerPart(NamedTuple, Generic[Item]):
    """A caller's part of a step in which nobody is bounded."""

    caller: bytes
    weight: float
    gain: float
    """Tokens that are expected of it."""
    num_rows: int
    most_gain: float
    """Tokens that are expected of all that might be fed for it."""
    least_rows: int
    """Rows that a step of it has at least."""
    alone: Callable[[], Alone[Item]]


def away(caller: bytes, weight: float) -> CallerPart[Item]:
    """Return the part of a caller that has nothing to feed now, and soon will have: as if a row alone were all."""
    return CallerPart(caller, weight, 1.0, 0, 1.0, 1, lambda: Alone(1.0, ()))


class RowBudget(Generic[Item]):
    """Of one worker."""

    def __init__(self, cost: RowCost) -> None:
        self._cost = cost
        self._given = VirtualTokens()
        self._alone_s: dict[bytes, float] = {}
        """Of callers that may bound a step, what a step of each alone takes where nothing disturbs it."""
        self.bounding: bytes | None = None
        """By whom the step is bounded that was dealt last; None where nobody is."""
        self._num_rows = 1.0
        """Of a bounded step."""
        self._num_since_alone = ALONE_EVERY
        self._alone: bytes | None = None
        """Whose alone the step is that was dealt last, all that it would feed."""
        self._longest_s: float | None = None
        """What that step was to take at most; None where it was not bounded, or had fewer rows than it might."""

    def deal(self, parts: Sequence[CallerPart[Item]]) -> list[Item] | None:
        """Return what is in the next step; None where nobody is bounded."""
        self._alone = self._longest_s = None
        if len(parts) < 2 or self._is_fair(parts):
            self._given.wait({}, ())
            self._alone_s.clear()
            self.bounding = None
            return None
        total = sum(part.weight for part in parts)
        alone = {part.caller: part.alone() for part in parts}
        by_s = {p.caller: self._seconds(p.caller, alone[p.caller].num_rows) * total / p.weight for p in parts}
        bounding = self.bounding = min(by_s, key=by_s.__getitem__)
        units = {caller: deque(each.units) for caller, each in alone.items() if each.units}
        self._num_rows = max(1.0, min(self._num_rows, sum(part.num_rows for part in parts)))
        num_rows = round(self._num_rows)
        self._num_since_alone += 1
        stepping = units
        if bounding in units and self._num_since_alone >= ALONE_EVERY:
            self._num_since_alone = 0
            stepping, num_rows = {bounding: units[bounding]}, alone[bounding].num_rows
        weights = {part.caller: part.weight for part in parts}
        self._given.wait({caller: weights[caller] for caller in units}, alone)
        dealt = self._dealt(stepping, num_rows)
        self._given.wait({caller: weights[caller] for caller, own in units.items() if own}, alone)
        self._alone_s = {caller: seconds for caller, seconds in self._alone_s.items() if caller in alone}
        if any(stepping.values()):
            self._longest_s = by_s[bounding]
        elif len(stepping) == 1:
            (self._alone,) = stepping
        return dealt

    def note(self, seconds: float, dealing_s: float = 0.0) -> None:
        """Record how long the step took that was dealt last, nothing else in it. dealing_s: what passed before it, for
        the slots of all, in the step or not.
        """
        if self._alone is not None:
            before = self._alone_s.get(self._alone, seconds)
            mean_s = before + _WEIGHT * (min(seconds, _OUTLIER * before) - before)
            # What disturbs a step makes it longer, and is not its own.
            self._alone_s[self._alone] = min(seconds, mean_s)
        elif self._longest_s is not None:
            ratio = min(_OUTLIER, self._longest_s / (seconds + dealing_s))
            self._num_rows *= 1.0 + _WEIGHT * (ratio - 1.0)

    def _is_fair(self, parts: Sequence[CallerPart[Item]]) -> bool:
        """Return whether each gains its part of what it would gain alone."""
        seconds = self._cost.seconds(max(1, sum(part.num_rows for part in parts)))
        if seconds is None:
            return True  # nothing has run yet
        total = sum(part.weight for part in parts)
        for part in parts:
            part_s = seconds * part.weight / total
            if part.gain * self._seconds(part.caller, part.least_rows) >= part.most_gain * part_s:
                continue  # it gains its part of more than it could
            alone = part.alone()
            if not alone.units or part.gain * self._seconds(part.caller, alone.num_rows) < alone.gain * part_s:
                return False
        return True

    def _dealt(self, units: dict[bytes, deque[Unit[Item]]], left: int) -> list[Item]:
        dealt, waiting = list[Item](), dict(units)
        while left > 0 and waiting:
            caller = min(waiting, key=lambda each: self._given.with_more(each, waiting[each][0].num_rows))
            unit = waiting[caller].popleft()
            dealt.append(unit.item)
            left -= unit.num_rows
            self._given.give(caller, unit.num_rows)
            if not waiting[caller]:
                del waiting[caller]
        return dealt

    def _seconds(self, caller: bytes, num_rows: int) -> float:
        """Return what a step of a caller alone takes; of all steps the same while nothing is known."""
        return self._alone_s.get(caller) or self._cost.least_seconds(max(1, num_rows)) or 1.0
