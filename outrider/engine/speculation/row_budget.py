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
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.scheduling import VirtualTokens

ALONE_EVERY = 4
"""Bounded steps of which one is the bounding caller's alone."""
_WEIGHT = 0.25
"""Weight of a step in what is learnt."""
_OUTLIER = 4.0
"""Most times the mean that a step counts as: the machine may have had other things to do."""

Item = TypeVar("Item")


class Unit(NamedTuple, Generic[Item]):
    """What is dealt out at once."""

    item: Item
    num_rows: int


class CallerPart(NamedTuple, Generic[Item]):
    """A caller's part of a step in which nobody is bounded, and the step that it would take alone.

    One that has nothing to feed now, and soon will have, counts as if a row alone were all.
    """

    caller: bytes
    weight: float
    gain: float = 1.0
    """Tokens that are expected of its part."""
    num_rows: int = 0
    """Of its part."""
    alone_gain: float = 1.0
    """Tokens that are expected of the step alone."""
    units: Sequence[Unit[Item]] = ()
    """Of the step alone, in the order in which they are dealt."""

    @property
    def num_alone(self) -> int:
        """Rows of the step alone."""
        return sum(unit.num_rows for unit in self.units)


class RowBudget(Generic[Item]):
    """The rows of a worker's steps, shared between callers."""

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
        self._max_step_s: float | None = None
        """What that step was to take at most; None where it was not bounded, or had fewer rows than it might."""

    def deal(self, parts: Sequence[CallerPart[Item]]) -> list[Item] | None:
        """Return what is in the next step; None where nobody is bounded."""
        self._alone = self._max_step_s = self.bounding = None
        step_s, max_rows, total_weight = 0.0, 0, 0.0
        for part in parts:
            max_rows += part.num_rows
            total_weight += part.weight
        if len(parts) > 1:
            step_s = self._cost.seconds(max(1, max_rows)) or 0.0  # nothing has run yet
        by_caller = {part.caller: part for part in parts}
        max_step_s = dict[bytes, float]()  # with which each caller has its part
        is_fair = True
        for part in parts if step_s else ():
            own_s = self._alone_s.get(part.caller) or self._cost.least_seconds(max(1, part.num_alone)) or 1.0
            max_step_s[part.caller] = own_s * total_weight / part.weight
            is_fair = is_fair and part.gain * max_step_s[part.caller] >= part.alone_gain * step_s
        if is_fair:
            self._given.wait({}, ())
            self._alone_s.clear()
            return None
        bounding = self.bounding = min(max_step_s, key=max_step_s.__getitem__)
        units = {part.caller: deque(part.units) for part in parts if part.units}
        self._num_rows = max(1.0, min(self._num_rows, max_rows))
        num_rows = round(self._num_rows)
        self._num_since_alone += 1
        stepping = units
        if bounding in units and self._num_since_alone >= ALONE_EVERY:
            self._num_since_alone = 0
            stepping, num_rows = {bounding: units[bounding]}, by_caller[bounding].num_alone
        weights = {part.caller: part.weight for part in parts if part.caller in units}
        self._given.wait(weights, by_caller)
        dealt = self._dealt(stepping, num_rows)
        self._given.wait({caller: weight for caller, weight in weights.items() if units[caller]}, by_caller)
        self._alone_s = {caller: seconds for caller, seconds in self._alone_s.items() if caller in by_caller}
        if any(stepping.values()):
            self._max_step_s = max_step_s[bounding]
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
        elif self._max_step_s is not None:
            ratio = min(_OUTLIER, self._max_step_s / (seconds + dealing_s))
            self._num_rows *= 1.0 + _WEIGHT * (ratio - 1.0)

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
