"""Decides which draft tokens a step verifies, over all slots and gateways together, and whether it waits for some.

Rows are taken best first for as long as they make more tokens a second, by what steps of so many rows take on this
machine, if together they make MIN_GAIN times as many. Under load no row is worth it any more, and the step is plain:
that nothing is slower with draft tokens than without follows from this rule. A request that names how many are verified
gets them whatever they cost. Where a slot says how long a token may take, draft tokens of all are left out for it. Rows
that a drafter has fed beside them, for later steps' sake, are rows like any: they are taken where the tokens that such
rows brought a step pay for them and for the draft tokens that came of them.

A caller that would slow another by more than its part is bounded (`outrider.engine.speculation.row_budget`): draft
tokens are left out first, whether a request names their number or not, then whole slots, those that came last before
others. The step is then held for draft tokens of the bounding caller, where they are worth the wait to that caller:
with draft tokens that come late it has half as many tokens.

Exactness. What is verified of a slot follows from clocks, probabilities, the distributions that tokens are drawn from
and how many rows were fed in steps before: never from what was drawn to be verified in this one. So a tree of a named
shape of sampled tokens, whose size may follow from them, counts as large as it may be, and is verified as a whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from outrider.engine.speculation.row_budget import Alone, CallerPart, RowBudget, Unit, away
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.wire.scheduling import Scheduling
from target_service.hold import PendingDraft, hold_until
from target_service.step_demand import StepDemand

PROBE_STEPS = 16
"""Steps of which one takes half the rows that seem best, and no extra ones, so that what fewer rows take stays known:
they are passed over for a first step that was slow."""
MIN_GAIN = 1.2
"""Times the tokens a second of a plain step that rows with draft tokens have to promise. What these cost beside their
rows, messages and memory that others read, was 5 to 10 % of a step of 8 to 64 answers on two cores, and at 1.1 eight
answers were 0.91 times as fast as plain. At 1.4, draft tokens that pay are passed over."""
_RATE_WEIGHT = 0.25
"""Weight of a step in the rate of tokens."""

_Item = tuple[int, int]
"""A slot's index, and how many of its candidates are verified."""


class _Slot(NamedTuple):
    index: int
    demand: StepDemand
    num_rows: int
    """That it feeds without draft tokens."""


@dataclass(slots=True)
class _Plan:
    """The draft tokens that some slots would have verified together."""

    counts: list[int]
    """Of each slot, those that its request names."""
    offers: Sequence[tuple[float, int]]
    """Acceptance probability, and place of the slot, of those of the others, best first."""
    num_rows: int
    """Without these."""
    gain: float
    """Tokens that are expected without them."""
    num_taken: int = 0
    """Offers that are taken."""
    pays: bool = False
    """Whether those that make the most tokens a second are worth what draft tokens cost beside their rows."""

    def take(self, num_taken: int) -> list[int]:
        """Return how many candidates of each slot are verified, of so many offers."""
        counts = list(self.counts)
        for _, place in self.offers[:num_taken]:
            counts[place] += 1
        return counts


class VerifyBudget:
    """The draft tokens that the steps of one target may verify."""

    def __init__(self) -> None:
        self.cost = RowCost()
        self._shares = RowBudget[_Item](self.cost)
        self._num_chosen = 0
        self._pays = True
        """Whether the last candidates that might have been passed over were not."""
        self._rate = 0.0
        """Tokens that all slots together gain a second."""
        self._caller_pays: dict[bytes, bool] = {}
        """The same of callers that might be bounded, each alone."""
        self._bounding_gain = 0.0
        """Tokens that the step brings the bounding caller, as is expected."""
        self._bounding_rate = 0.0
        """The same, a second."""

    def note(self, num_rows: int, num_tokens: int, seconds: float, between_s: float = 0.0) -> None:
        """Record a step without prompts: what it was fed, and how many tokens it committed. between_s: what passed
        since the one before, or since somebody was ready.
        """
        self.cost.note(num_rows, seconds)
        self._rate += _RATE_WEIGHT * (num_tokens / seconds - self._rate)
        self._shares.note(seconds, between_s)
        self._bounding_rate += _RATE_WEIGHT * (self._bounding_gain / (seconds + between_s) - self._bounding_rate)

    # what is verified

    def choose(
        self,
        demands: Sequence[StepDemand],
        max_rows: int,
        absent: Iterable[Scheduling] = (),
        max_extra_rows: int | None = None,
    ) -> list[tuple[int, bool] | None]:
        """Return of each slot how many of its candidates are verified, and whether its extra rows are fed; None for one
        that waits for the next step.

        max_rows: of draft tokens and extra rows in all; max_extra_rows: of the latter and what they pay for, unless as
        many. absent: of slots that are not ready and soon will be.
        """
        self._num_chosen += 1
        is_probe = self._num_chosen % PROBE_STEPS == 0
        has_extra = self._choose_extra(demands, max_rows if max_extra_rows is None else max_extra_rows, is_probe)
        slots = list[_Slot]()
        for index, demand in enumerate(demands):
            extra_rows = demand.extra_rows if has_extra[index] else 0
            max_rows -= extra_rows
            slots.append(_Slot(index, demand, demand.num_pending_rows + extra_rows))
        plan = self._plan(slots, max_rows)
        if plan.offers:
            self._pays = plan.pays
        counts = plan.take(plan.num_taken // 2 if is_probe else plan.num_taken)
        chosen = self._share_out(slots, counts, max_rows, absent)
        return [None if count is None else (count, extra) for count, extra in zip(chosen, has_extra, strict=True)]

    def _choose_extra(self, demands: Sequence[StepDemand], max_rows: int, is_probe: bool) -> list[bool]:
        """Return whose extra rows are fed: of slots that name how many draft tokens are verified, and of those with
        which the most tokens a second are made, if together they make MIN_GAIN times as many as without.
        """
        has_extra = [False] * len(demands)
        offers = list[tuple[float, int]]()
        for index, demand in enumerate(demands):
            if demand.extra_rows and not demand.is_fixed:
                offers.append((-demand.extra_gain / demand.extra_cost_rows, index))
            elif demand.extra_rows and demand.extra_cost_rows <= max_rows:
                has_extra[index] = True
                max_rows -= demand.extra_cost_rows
        if is_probe or not offers:
            return has_extra
        gain, num_base_rows, num_more, num_best = float(len(demands)), 0, 0, 0
        for demand in demands:
            num_base_rows += demand.num_pending_rows
        offers.sort()
        best_rate = MIN_GAIN * gain / self._seconds(num_base_rows)
        for count, (_, index) in enumerate(offers, start=1):
            gain += demands[index].extra_gain
            num_more += demands[index].extra_cost_rows
            if num_more > max_rows or (count > 1 and num_base_rows + num_more > self.cost.reach):
                break
            rate = gain / self._seconds(num_base_rows + num_more)
            if rate >= best_rate:
                num_best, best_rate = count, rate
        for _, index in offers[:num_best]:
            has_extra[index] = True
        return has_extra

    def _plan(self, slots: Sequence[_Slot], max_rows: int) -> _Plan:
        """Return what would be verified, if nothing were tried out."""
        plan = _Plan([0] * len(slots), (), sum(slot.num_rows for slot in slots), float(len(slots)))
        offers = list[tuple[float, int]]()
        # Who needs the fewest rows goes first.
        for place, (_, demand, _) in sorted(enumerate(slots), key=lambda each: each[1].demand.max_rows):
            if not demand.num_required:
                offers += [(prob, place) for prob in demand.probs]
            elif demand.max_rows <= max_rows:
                plan.counts[place] = demand.num_required
                plan.num_rows += demand.num_required
                plan.gain += sum(demand.probs_of(demand.num_required))
                max_rows -= demand.max_rows
        plan.offers = sorted(offers, key=lambda offer: -offer[0])[:max_rows]
        probs = [prob for prob, _ in plan.offers]
        best = best_count(probs, plan.gain, plan.num_rows, self.cost)
        rate = (plan.gain + sum(probs[:best])) / self._seconds(plan.num_rows + best)
        is_known = self.cost.seconds(plan.num_rows) is not None
        if not is_known or rate >= MIN_GAIN * plan.gain / self._seconds(plan.num_rows):
            plan.num_taken = self._within_limits(plan, slots, best)
            plan.pays = plan.num_taken > 0 or not best
        return plan

    def _within_limits(self, plan: _Plan, slots: Sequence[_Slot], num_taken: int) -> int:
        """Return the most of so many offers with which every slot that says how long a token may take is expected to
        keep to it, but for those that no step would keep to.
        """
        max_step_s: dict[int, float] = {}  # by place: with the tokens that the slot is expected to have of the step
        for place, slot in enumerate(slots):
            limit_ms = slot.demand.scheduling.max_tpot_ms
            if limit_ms is not None:
                step_s = limit_ms / 1e3 * (1.0 + sum(slot.demand.probs_of(plan.counts[place])))
                if self._seconds(max(1, plan.num_rows)) <= step_s:
                    max_step_s[place] = step_s
        if not max_step_s:
            return num_taken
        best, min_step_s = 0, min(max_step_s.values())
        for count, (prob, place) in enumerate(plan.offers[:num_taken], start=1):
            if place in max_step_s:
                max_step_s[place] += prob * (slots[place].demand.scheduling.max_tpot_ms or 0.0) / 1e3
                min_step_s = min(max_step_s.values())
            if self._seconds(plan.num_rows + count) <= min_step_s:
                best = count
        return best

    def _seconds(self, num_rows: int) -> float:
        """Return what a step takes; of all steps the same while nothing is known."""
        return self.cost.seconds(num_rows) or 1.0

    # callers

    def _share_out(
        self, slots: Sequence[_Slot], counts: Sequence[int], max_rows: int, absent: Iterable[Scheduling]
    ) -> list[int | None]:
        """Return how many candidates of each slot are verified where all callers are to have their part, None for one
        that waits. counts: where nobody is bounded.
        """
        of_caller: dict[bytes, list[_Slot]] = {}
        for slot in slots:
            of_caller.setdefault(slot.demand.scheduling.caller, []).append(slot)
        away_weights = {each.caller: each.weight for each in absent if each.caller not in of_caller}
        parts = list[CallerPart[_Item]]()
        if len(of_caller) + len(away_weights) > 1:
            parts += [self._part(own, counts, max_rows) for own in of_caller.values()]
            parts += [away(caller, weight) for caller, weight in away_weights.items()]
        dealt = self._shares.deal(parts)
        if dealt is None:
            self._caller_pays, self._bounding_gain, self._bounding_rate = {}, 0.0, 0.0
            return list(counts)
        here = {part.caller for part in parts}
        self._caller_pays = {caller: pays for caller, pays in self._caller_pays.items() if caller in here}
        self._bounding_gain = 0.0
        chosen: list[int | None] = [None] * len(slots)
        for index, count in dealt:
            chosen[index] = count
        for index, demand, _ in of_caller.get(self._shares.bounding or b"", ()):
            count = chosen[index]
            if count is not None:
                self._bounding_gain += 1.0 + sum(demand.probs_of(count))
        return chosen

    def _part(self, slots: Sequence[_Slot], counts: Sequence[int], max_rows: int) -> CallerPart[_Item]:
        """Return the part of a caller whose slots these are. counts: of candidates of all slots."""
        scheduling = slots[-1].demand.scheduling
        gain, max_gain, num_rows, min_rows = 0.0, 0.0, 0, 0
        for index, demand, own_rows in slots:
            min_rows += own_rows
            num_rows += own_rows + demand.num_rows(counts[index])
            gain += 1.0 + sum(demand.probs_of(counts[index]))
            max_gain += 1.0 + sum(demand.probs)
        alone = partial(self._alone, slots, max_rows)
        return CallerPart(scheduling.caller, scheduling.weight, gain, num_rows, max_gain, min_rows, alone)

    def _alone(self, slots: Sequence[_Slot], max_rows: int) -> Alone[_Item]:
        """Return all slots of a caller without candidates, by priority and then by when they were ready, and behind
        them these, the likeliest first.
        """
        plan = self._plan(slots, max_rows)
        if plan.offers:
            self._caller_pays[slots[0].demand.scheduling.caller] = plan.pays
        plain, drafts, gain = list[tuple[int, float, Unit[_Item]]](), list[tuple[float, int, Unit[_Item]]](), 0.0
        for (index, demand, num_rows), count in zip(slots, plan.take(plan.num_taken), strict=True):
            plain.append((demand.scheduling.priority, demand.ready_s, Unit((index, 0), num_rows)))
            probs, least = demand.probs_of(count), 1.0
            gain += 1.0 + sum(probs)
            if count and demand.is_whole:
                drafts.append((-sum(probs) / demand.max_rows, 0, Unit((index, count), demand.max_rows)))
                continue
            for place, prob in enumerate(probs, start=1):
                least = min(least, prob)  # what comes first stays first
                drafts.append((-least, place, Unit((index, place), 1)))
        return Alone(gain, [unit for *_, unit in (*sorted(plain), *sorted(drafts))])

    # waiting

    def waited_for(self, pending: Sequence[PendingDraft]) -> Sequence[PendingDraft]:
        """Return by whose next tokens a step may be held: where steps are bounded, by those of the bounding caller."""
        if self._shares.bounding is None:
            return pending
        return [each for each in pending if each.lease.slot.scheduling.caller == self._shares.bounding]

    def hold_until(self, waited_for: Sequence[PendingDraft], now: float) -> float | None:
        """Return until when the step waits for those; None to go at once, as ever while draft tokens do not pay. Where
        steps are bounded, as if the bounding caller were alone: what a wait costs is counted in its own tokens.
        """
        caller = self._shares.bounding
        pays, rate = self._pays, self._rate
        if caller is not None:
            pays, rate = self._caller_pays.get(caller, True), self._bounding_rate
        return hold_until(waited_for, now, rate) if pays else None
