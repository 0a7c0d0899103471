"""How much of each slot is in a step: what the row rule chooses, unless that slows a caller by more than its part.

Where a step is bounded (`outrider.engine.speculation.row_budget`), draft tokens are left out first, whether a request
names their number or not, then whole slots, those that came last before others. It is held for guesses of the caller by
whom it is bounded where they are worth the wait to that caller: with guesses that come late it has half as many tokens.

Exactness. What is verified of a slot follows from clocks, chances, the laws that tokens are drawn from and how many
rows were fed in steps before: never from what was drawn to be verified in this one. So a tree of a named shape of drawn
tokens, whose size may follow from them, counts as large as it may be, and is verified as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Any

from outrider.engine.speculation.row_budget import Alone, CallerPart, RowBudget, Unit, away
from outrider.wire.scheduling import Scheduling

Candidates = Any
from target_service.rows import RATE_WEIGHT, Lacking, RowRule

_Item = tuple[int, int]
"""A slot's index, and how many of its candidates are verified."""


class StepBudget:
    """Of one target."""

    def __init__(self, rule: RowRule) -> None:
        self._rule = rule
        self._budget = RowBudget[_Item](rule.cost)
        self._pays: dict[bytes, bool] = {}
        """Whether drafts would pay for callers that might be bounded, each alone, by the last that there were."""
        self._gain = 0.0
        """Tokens that the step brings the caller by whom it is bounded, as is expected."""
        self._rate = 0.0
        """The same, a second."""

    def choose(
        self, found: Sequence[Candidates], tails: Sequence[int], most: int, absent: Iterable[Scheduling]
    ) -> list[int | None]:
        """Return how many candidates of each slot are verified, None for one that waits for the next step. tails: the
        rows of each without any; most: candidates in all; absent: of slots that are not ready and soon will be.
        """
        counts = self._rule.choose(found, sum(tails), most)
        slots, weights = dict[bytes, list[int]](), dict[bytes, float]()
        for index, each in enumerate(found):
            slots.setdefault(each.lease.slot.scheduling.caller, []).append(index)
            weights[each.lease.slot.scheduling.caller] = each.lease.slot.scheduling.weight
        absent_weights = {each.caller: each.weight for each in absent if each.caller not in slots}
        if len(slots) + len(absent_weights) < 2:
            dealt = self._budget.deal(())
        else:
            parts = [self._part(name, weights[name], own, found, tails, counts, most) for name, own in slots.items()]
            dealt = self._budget.deal([*parts, *(away(name, weight) for name, weight in absent_weights.items())])
        if dealt is None:
            self._pays, self._gain, self._rate = {}, 0.0, 0.0
            return [*counts]
        self._pays = {name: pays for name, pays in self._pays.items() if name in slots or name in absent_weights}
        chosen: list[int | None] = [None] * len(found)
        for index, count in dealt:
            chosen[index] = count
        own = [(found[index], chosen[index]) for index in slots.get(self._budget.bounding or b"", ())]
        self._gain = sum(1.0 + sum(_fed(each, count)) for each, count in own if count is not None)
        return chosen

    def note(self, seconds: float, dealing_s: float) -> None:
        """Record a step without prompts. dealing_s: what passed since the one before, or since somebody was ready."""
        self._budget.note(seconds, dealing_s)
        self._rate += RATE_WEIGHT * (self._gain / (seconds + dealing_s) - self._rate)

    def waited_for(self, lacking: Sequence[Lacking]) -> Sequence[Lacking]:
        """Return by whose next guesses a step may be held: where steps are bounded, by those of the bounding caller."""
        if self._budget.bounding is None:
            return lacking
        return [each for each in lacking if each.lease.slot.scheduling.caller == self._budget.bounding]

    def hold_until(self, waited_for: Sequence[Lacking], now: float) -> float | None:
        """Return until when the step waits for those, as the row rule does; where steps are bounded, as if the caller
        by whom they are were alone: what a wait costs is counted in its own tokens.
        """
        caller = self._budget.bounding
        if caller is None:
            return self._rule.hold_until(waited_for, now)
        return self._rule.hold_until(waited_for, now, self._rate) if self._pays.get(caller, True) else None

    def _part(
        self,
        caller: bytes,
        weight: float,
        slots: Sequence[int],
        found: Sequence[Candidates],
        tails: Sequence[int],
        counts: Sequence[int],
        most: int,
    ) -> CallerPart[_Item]:
        own = [found[index] for index in slots]
        fed = [_fed(each, counts[index]) for each, index in zip(own, slots, strict=True)]
        num_tail = sum(tails[index] for index in slots)
        return CallerPart(
            caller,
            weight,
            len(own) + sum(map(sum, fed)),
            num_tail + sum(map(len, fed)),
            len(own) + sum(sum(_chances(each)) for each in own),
            num_tail,
            partial(self._alone, caller, slots, own, [tails[index] for index in slots], most),
        )

    def _alone(
        self, caller: bytes, slots: Sequence[int], found: Sequence[Candidates], tails: Sequence[int], most: int
    ) -> Alone[_Item]:
        """Return all slots without candidates, by priority and then by when they could go on, and behind them these,
        the likeliest first.
        """
        plan = self._rule.plan(found, sum(tails), most)
        if plan.offers:
            self._pays[caller] = plan.pays
        plain, drafts, gain = list[tuple[int, float, Unit[_Item]]](), list[tuple[float, int, Unit[_Item]]](), 0.0
        for slot, each, tail, count in zip(slots, found, tails, plan.counts(plan.count), strict=True):
            plain.append((each.lease.slot.scheduling.priority, each.lease.ready_s, Unit((slot, 0), tail)))
            chances, least = _fed(each, count), 1.0
            gain += 1.0 + sum(chances)
            if chances and each.is_whole:
                drafts.append((-sum(chances) / len(chances), 0, Unit((slot, count), len(chances))))
                continue
            for place, chance in enumerate(chances, start=1):
                least = min(least, chance)  # what comes first stays first
                drafts.append((-least, place, Unit((slot, place), 1)))
        return Alone(gain, [unit for *_, unit in (*sorted(plain), *sorted(drafts))])


def _chances(found: Candidates) -> Sequence[float]:
    """Return of each candidate the chance to be kept, without a look at what was drawn."""
    shape = found.lease.speculation.tree
    if shape is None or not found.must or not found.is_whole:
        return found.gains
    chances = list(accumulate(repeat(found.lease.first.shares.share(0), shape.depth), mul))
    return chances + [0.0] * (found.most_must - shape.depth)


def _fed(found: Candidates, count: int) -> Sequence[float]:
    """Return the chances of the candidates that are verified with so many."""
    return _chances(found) if count and found.is_whole else _chances(found)[:count]
