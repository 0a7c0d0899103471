"""Divides a worker's steps between callers, by weight, where one of them would slow another by more than its share.

A caller that has the worker to itself would gain a number of tokens a second. When it shares the worker, it must gain
at least its share of that number: its weight over the sum of all weights, i.e. half for each of two equal callers. If
the step with the most tokens a second over all callers leaves one of them less, the step is bounded: its time is
limited so that every caller gets its share, and its rows are dealt one `BudgetUnit` after the other, each to the caller
with the fewest rows so far, divided by its weight. Other rows wait for the next step. There is always room for every
caller's share, since a step of many rows takes no longer than several steps with the same number of rows in all.

The number of rows of a bounded step is learnt from the time that earlier ones took. Of the steps that a caller bounds,
one in ALONE_EVERY has that caller's rows only, to measure the time of such a step. Used by both workers' budgets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.scheduling import VirtualTokens

ALONE_EVERY = 4
"""If steps are limited so that one caller gets its share of the worker, one in so many of them has that caller's rows
only. It measures how fast the caller would run alone."""
_WEIGHT = 0.25
"""Weight of a step in the moving means of this module."""
_OUTLIER = 4.0
"""Maximum multiple of the mean with which a step's time counts, since another process may have disturbed it."""

Item = TypeVar("Item")


class BudgetUnit(NamedTuple, Generic[Item]):
    """Rows of one caller that enter a step together or not at all."""

    item: Item
    gain: float
    """Expected number of output tokens that the caller gains by these rows."""
    num_rows: int


class RowBudget(Generic[Item]):
    """Division of a worker's steps between callers. Each caller gets at least its share (its weight over the sum of all
    weights) of the tokens a second that it would get with the worker to itself. `deal` chooses the rows of a step,
    `note` records how long the step took.
    """

    def __init__(self, cost: RowCost) -> None:
        self._cost = cost
        self._granted = VirtualTokens()
        self._alone_s: dict[bytes, float] = {}
        """By caller: mean seconds of an undisturbed step with its rows only. Only callers that may bound steps have an
        entry."""
        self.bounding: bytes | None = None
        """Caller for whose sake `deal` limited the time of the last step, so that it gets its share of the worker's
        tokens a second; None if `deal` limited nothing."""
        self._num_rows = 1.0
        """Number of rows of a bounded step."""
        self._num_since_alone = ALONE_EVERY
        self._alone: bytes | None = None
        """Caller whose rows alone, and all of them, are in the step dealt last; None for other steps."""
        self._max_step_s: float | None = None
        """Maximum seconds of the step dealt last; None if it is not bounded, or if all rows were dealt."""

    def deal(
        self,
        weights: Mapping[bytes, float],
        step: Iterable[tuple[bytes, float, int]],
        alone: Callable[[bytes], Iterable[BudgetUnit[Item]]],
    ) -> list[Item] | None:
        """Choose the rows of the next step if it has to be shorter than `step`, and return the field `item` of each
        chosen `BudgetUnit` (rows that a step takes together or not at all). Return None if `step` can run as it is. A
        step has to be shorter if a caller would get fewer tokens a second than its share (its weight over the sum of
        weights) of those that it would have alone.

        weights: weights of all callers that share the worker. step: the step without a limit, as (caller, expected
        tokens, number of rows). alone: function that returns the `BudgetUnit`s of the step that a caller would run
        alone, in the order in which they are taken. An empty result means that the caller has no rows now but soon
        will, and counts as one row.

        Example: A has 1 row and B 31, with equal weights; a step of 1 row takes 8 ms, one of 32 rows 20 ms. A would
        gain 1 token in 20 ms, and its share is half of 1 token in 8 ms. So the step is limited to 16 ms: A's row, and
        as many of B's as fit.
        """
        self._alone = None
        self._max_step_s = None
        self.bounding = None
        units = dict[bytes, deque[BudgetUnit[Item]]]()
        max_step_s = dict[bytes, float]()  # seconds of a step that leaves each caller its part
        max_rows = 0
        is_fair = True
        if len(weights) > 1:
            gains = dict[bytes, float]()
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
                own_s = self._alone_s.get(caller) or self._cost.min_seconds(num_alone)
                max_step_s[caller] = own_s * total_weight / weight
                is_fair = is_fair and gain * max_step_s[caller] >= alone_gain * step_s
        if is_fair:
            self._granted.wait({}, ())
            self._alone_s.clear()
            return None
        bounding = min(max_step_s, key=max_step_s.__getitem__)
        self.bounding = bounding
        self._num_rows = max(1.0, min(self._num_rows, max_rows))
        stepping, num_rows = self._stepping(units, bounding)
        self._granted.wait(_weights_of_waiting(weights, units), weights)
        dealt = self._dealt(stepping, num_rows)
        self._granted.wait(_weights_of_waiting(weights, units), weights)
        for caller in self._alone_s.keys() - weights.keys():
            del self._alone_s[caller]
        if any(stepping.values()):
            self._max_step_s = max_step_s[bounding]
        elif len(stepping) == 1:
            (self._alone,) = stepping
        return dealt

    def _stepping(
        self, units: dict[bytes, deque[BudgetUnit[Item]]], bounding: bytes
    ) -> tuple[dict[bytes, deque[BudgetUnit[Item]]], int]:
        """Return the `BudgetUnit`s to choose from, by caller, and the maximum number of rows to take."""
        self._num_since_alone += 1
        if bounding not in units or self._num_since_alone < ALONE_EVERY:
            return units, round(self._num_rows)
        self._num_since_alone = 0
        own = units[bounding]
        return {bounding: own}, sum(unit.num_rows for unit in own)

    def note(self, seconds: float, dealing_s: float = 0.0) -> None:
        """Record how many seconds the step took for which `deal` was called last. The step must have had only the rows
        that `deal` returned or, if that was None, those of its argument `step`.

        dealing_s: seconds before the step that were spent on slots of all callers, whether their rows are in the step
        or not.
        """
        if self._alone is not None:
            previous_s = self._alone_s.get(self._alone, seconds)
            mean_s = previous_s + _WEIGHT * (min(seconds, _OUTLIER * previous_s) - previous_s)
            self._alone_s[self._alone] = min(seconds, mean_s)  # a disturbed step is longer, never shorter
        elif self._max_step_s is not None:
            ratio = min(_OUTLIER, self._max_step_s / (seconds + dealing_s))
            self._num_rows *= 1.0 + _WEIGHT * (ratio - 1.0)

    def _dealt(self, units: dict[bytes, deque[BudgetUnit[Item]]], num_rows: int) -> list[Item]:
        def granted_with_next(caller: bytes) -> float:
            return self._granted.served_after(caller, waiting[caller][0].num_rows)

        dealt = list[Item]()
        waiting = dict(units)
        while num_rows > 0 and waiting:
            caller = min(waiting, key=granted_with_next)
            unit = waiting[caller].popleft()
            dealt.append(unit.item)
            num_rows -= unit.num_rows
            self._granted.add_served(caller, unit.num_rows)
            if not waiting[caller]:
                del waiting[caller]
        return dealt


def _weights_of_waiting(
    weights: Mapping[bytes, float], units: Mapping[bytes, deque[BudgetUnit[Item]]]
) -> dict[bytes, float]:
    found = dict[bytes, float]()
    for caller, own in units.items():
        if own:
            found[caller] = weights[caller]
    return found
