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
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.scheduling import VirtualTokens

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
    gain: float
    """Tokens that are expected of it."""
    num_rows: int


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

    def deal(
        self,
        weights: Mapping[bytes, float],
        step: Iterable[tuple[bytes, float, int]],
        alone: Callable[[bytes], Iterable[Unit[Item]]],
    ) -> list[Item] | None:
        """Return what is in the next step; None where nobody is bounded.

        weights: of all callers that share the worker. step: caller, expected tokens and number of rows of each part of
        the step in which nobody is bounded. alone: returns the units of the step that a caller would take alone, in the
        order in which they are dealt; where it has nothing to feed now, and soon will have, it counts as if a row were
        all. Neither `step` nor `alone` is read where one caller has the worker to itself.
        """
        self._alone = self._max_step_s = self.bounding = None
        gains, units = dict[bytes, float](), dict[bytes, deque[Unit[Item]]]()
        max_step_s = dict[bytes, float]()  # with which each caller has its part
        max_rows, is_fair = 0, True
        if len(weights) > 1:
            for caller, gain, num_rows in step:
                gains[caller] = gains.get(caller, 0.0) + gain
                max_rows += num_rows
            step_s = float(self._cost.seconds(max_rows))
            total_weight = sum(weights.values())
            for caller, weight in weights.items():
                own = deque(alone(caller))
                if own:
                    units[caller] = own
                    gain = gains.get(caller, 0.0)
                    alone_gain = sum(unit.gain for unit in own)
                    num_alone = sum(unit.num_rows for unit in own)
                else:
                    gain = 1.0
                    alone_gain = 1.0
                    num_alone = 1
                own_s = self._alone_s.get(caller) or self._cost.least_seconds(num_alone)
                max_step_s[caller] = own_s * total_weight / weight
                is_fair = is_fair and gain * max_step_s[caller] >= alone_gain * step_s
        if is_fair:
            self._given.wait({}, ())
            self._alone_s.clear()
            return None
        bounding = self.bounding = min(max_step_s, key=max_step_s.__getitem__)
        self._num_rows = max(1.0, min(self._num_rows, max_rows))
        left = round(self._num_rows)
        self._num_since_alone += 1
        stepping = units
        if bounding in units and self._num_since_alone >= ALONE_EVERY:
            self._num_since_alone = 0
            stepping = {bounding: units[bounding]}
            left = sum(unit.num_rows for unit in units[bounding])
        self._given.wait({caller: weights[caller] for caller in units}, weights)
        dealt = self._dealt(stepping, left)
        self._given.wait({caller: weights[caller] for caller in units if units[caller]}, weights)
        self._alone_s = {caller: seconds for caller, seconds in self._alone_s.items() if caller in weights}
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
