"""Shares steps between callers, by weight, where one of them would slow another by more than its share.

Alone, a caller would make so many tokens a second: of its own slots, with as many of their draft tokens as are worth
it. Beside others it is to make its part of that, its weight over that of all who have slots here: of two alike each at
least half. Where the step that makes the most tokens a second, over all, leaves somebody less, it is bounded: it takes
no longer than lets everybody whose slots are all in it have their part, and its rows are dealt out one slot, then one
draft token after another, to whom least was given over its weight. What is left over waits for the next step: first
draft tokens, whether a request names their number or not, then whole slots, those that came first before others.

Exactness. What is verified of a slot follows from clocks, chances, the laws that tokens are drawn from and how many
tokens were committed in steps before: never from what was drawn to be verified in this one. So a tree of a named shape
of drawn tokens, whose size may follow from them, counts as large as it may be, and is verified as a whole or not at
all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from outrider.wire.scheduling import Scheduling, VirtualTokens
from target_service.lease import Candidates
from target_service.rows import RowRule


class StepBudget:
    """Of one target."""

    def __init__(self, rule: RowRule) -> None:
        self._rule = rule
        self._served = VirtualTokens()

    def choose(
        self, found: Sequence[Candidates], tails: Sequence[int], most: int, away: Iterable[Scheduling]
    ) -> list[int | None]:
        """Return how many candidates of each slot are verified, None for one that waits for the next step. tails: the
        rows of each without any; most: candidates in all; away: of slots that are not ready and soon will be.
        """
        counts = self._rule.choose(found, sum(tails), most)
        callers = _callers(found, tails, counts, away)
        if len(callers) < 2 or self._is_fair(callers, most):
            self._served.keep(())
            return [*counts]
        return self._dealt(callers, len(found), most)

    def _is_fair(self, callers: Sequence[_Caller], most: int) -> bool:
        """Return whether each makes its part of what it would make alone."""
        seconds = self._rule.cost.seconds(sum(caller.planned.num_rows for caller in callers))
        if seconds is None:
            return True  # nothing has run yet
        total = sum(caller.weight for caller in callers)
        for caller in callers:
            part_s = seconds * caller.weight / total
            if caller.planned.gain * self._least_s(caller.num_tail) >= caller.most_gain * part_s:
                continue  # it makes its part of more than it could
            alone = self._alone(caller, most)
            if caller.planned.gain * self._least_s(alone.num_rows) < alone.gain * part_s:
                return False
        return True

    def _alone(self, caller: _Caller, most: int) -> _Planned:
        """Return the step that a caller would take alone."""
        if not caller.slots:
            return caller.planned
        plan = self._rule.plan(caller.found, caller.num_tail, most)
        return _planned(caller.found, caller.tails, plan.counts(plan.count))

    def _dealt(self, callers: Sequence[_Caller], num_slots: int, most: int) -> list[int | None]:
        total = sum(caller.weight for caller in callers)
        longest_s, units = math.inf, dict[bytes, deque[_Unit]]()
        for caller in callers:
            alone = self._alone(caller, most)
            longest_s = min(longest_s, self._least_s(alone.num_rows) * total / caller.weight)
            if caller.slots:
                units[caller.name] = _units(caller, alone.counts)
                self._served.join(caller.name)
        weights = {caller.name: caller.weight for caller in callers}
        left = self._rule.cost.most_rows(longest_s, sum(unit.num_rows for own in units.values() for unit in own))
        dealt: list[int | None] = [None] * num_slots
        while left > 0 and units:
            name = min(units, key=self._served.given)
            unit = units[name].popleft()
            dealt[unit.slot] = unit.count
            left -= unit.num_rows
            self._served.give(name, unit.num_rows, weights[name])
            if not units[name]:
                del units[name]
        self._served.keep(units)
        return dealt

    def _least_s(self, num_rows: int) -> float:
        """Return the seconds of a step; of all steps the same while nothing is known."""
        return self._rule.cost.least_seconds(num_rows) or 1.0


class _Planned(NamedTuple):
    """A caller's part of a step."""

    gain: float
    """Tokens that are expected of it."""
    num_rows: int
    counts: Sequence[int]
    """Of each of its slots, how many candidates are verified."""


class _Caller(NamedTuple):
    """One whose slots are ready, or soon will be."""

    name: bytes
    weight: float
    slots: Sequence[int]
    """None where it is away."""
    found: Sequence[Candidates]
    tails: Sequence[int]
    planned: _Planned
    """Where nobody is bounded. Of one that is away: a row."""

    @property
    def num_tail(self) -> int:
        """Return the rows of all its slots without candidates."""
        return sum(self.tails)

    @property
    def most_gain(self) -> float:
        """Return the tokens that are expected of all that might be verified."""
        return sum((1.0 + sum(_chances(each)) for each in self.found), 0.0 if self.slots else 1.0)


class _Unit(NamedTuple):
    """What is dealt out at once."""

    slot: int
    count: int
    """Candidates of the slot that are verified, with this."""
    num_rows: int


def _callers(
    found: Sequence[Candidates], tails: Sequence[int], counts: Sequence[int], away: Iterable[Scheduling]
) -> list[_Caller]:
    slots, weights = dict[bytes, list[int]](), dict[bytes, float]()
    for index, each in enumerate(found):
        scheduling = each.lease.slot.scheduling
        slots.setdefault(scheduling.caller, []).append(index)
        weights[scheduling.caller] = scheduling.weight
    for scheduling in away:
        slots.setdefault(scheduling.caller, [])
        weights.setdefault(scheduling.caller, scheduling.weight)
    if len(slots) < 2:
        return []
    callers = list[_Caller]()
    for name, own in slots.items():
        parts = [found[index] for index in own], [tails[index] for index in own] or [1]
        planned = _planned(*parts, [counts[index] for index in own]) if own else _Planned(1.0, 1, ())
        callers.append(_Caller(name, weights[name], own, *parts, planned))
    return callers


def _planned(found: Sequence[Candidates], tails: Sequence[int], counts: Sequence[int]) -> _Planned:
    chances = [
        _chances(each) if _is_whole(each) and count else _chances(each)[:count]
        for each, count in zip(found, counts, strict=True)
    ]
    return _Planned(len(found) + sum(map(sum, chances)), sum(tails) + sum(map(len, chances)), counts)


def _units(caller: _Caller, counts: Sequence[int]) -> deque[_Unit]:
    """Return what a caller's step consists of, in the order in which it is dealt: all slots without candidates, by
    priority and then by when they could go on, then these, the likeliest first. counts: of each slot.
    """
    plain, drafts = list[tuple[int, float, _Unit]](), list[tuple[float, int, _Unit]]()
    for slot, found, tail, count in zip(caller.slots, caller.found, caller.tails, counts, strict=True):
        plain.append((found.lease.slot.scheduling.priority, found.lease.ready_s, _Unit(slot, 0, tail)))
        chances, least = _chances(found), 1.0
        if count and _is_whole(found):
            drafts.append((-sum(chances) / len(chances), 0, _Unit(slot, count, len(chances))))
            continue
        for place, chance in enumerate(chances[:count], start=1):
            least = min(least, chance)  # what comes first stays first
            drafts.append((-least, place, _Unit(slot, place, 1)))
    return deque(unit for *_, unit in (*sorted(plain), *sorted(drafts)))


def _is_whole(found: Candidates) -> bool:
    """Return whether what was drawn may have decided how much is here."""
    params = found.lease.slot.params
    return found.lease.speculation.tree is not None and not params.determined and params.lenience == 1.0


def _chances(found: Candidates) -> Sequence[float]:
    """Return of each candidate the chance to be kept, without a look at what was drawn."""
    shape = found.lease.speculation.tree
    if shape is None or not _is_whole(found):
        return found.gains
    chances = accumulate(repeat(found.lease.first.shares.share(0), shape.depth), mul)
    return [*chances, *[0.0] * (shape.most_nodes - shape.depth)]
