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
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from outrider.engine.speculation.row_budget import Alone, CallerPart, RowBudget, Unit, away
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.wire.scheduling import Scheduling
from target_service.hold import PendingDraft, hold_until

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


@dataclass(frozen=True, slots=True)
class VerifyDemand:
    """What one slot would have a step verify. Nothing of it follows from what was sampled."""

    probs: Sequence[float] = ()
    """Acceptance probability of each candidate draft token, best first. Of a tree whose size may follow from what was
    sampled: of its levels."""
    num_required: int = 0
    """Candidates that are verified whatever they cost, where the request names how many; 0: as many as pay."""
    max_rows: int = 0
    """Rows that the required ones may come to: of a tree whose size may follow from what was sampled, as many as it may
    have."""
    is_whole: bool = False
    """The required ones are verified together or not at all."""
    is_fixed: bool = False
    """The request names how many draft tokens a step verifies, whether there are some or not."""
    num_pending: int = 1
    """Rows that the step feeds of the slot without any draft token."""
    extra_rows: int = 0
    """Rows that the slot's drafter would have fed beside the draft tokens, for those of later steps."""
    extra_gain: float = 0.0
    """Tokens a step that they are expected to bring."""
    extra_cost_rows: int = 0
    """Rows to be paid for that in all: these, and of the draft tokens those that came of earlier ones."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    ready_s: float = 0.0
    """Monotonic time since when the slot is ready, in seconds."""

    def num_rows(self, num_drafts: int) -> int:
        """Return the rows that so many candidates count as."""
        return self.max_rows if num_drafts and self.is_whole else num_drafts

    def gain(self, num_drafts: int) -> float:
        """Return the tokens that the step is expected to bring with so many candidates."""
        return 1.0 + sum(self.probs if num_drafts and self.is_whole else self.probs[:num_drafts])


class VerifyChoice(NamedTuple):
    """What a step verifies of one slot."""

    num_drafts: int
    """Candidates."""
    with_extra_rows: bool


class _Slot(NamedTuple):
    index: int
    demand: VerifyDemand
    num_rows: int
    """That it feeds without draft tokens."""


@dataclass(slots=True)
class _Plan:
    """The draft tokens that some slots would have verified together."""

    required: list[int]
    """Of each slot."""
    num_rows: int
    """With these alone."""
    gain: float
    """Tokens that are expected then."""
    offers: Sequence[tuple[float, int]] = ()
    """Acceptance probability, and place of the slot, of those of the others, best first."""
    num_taken: int = 0
    """Offers that are taken."""
    pays: bool = False
    """Whether those that make the most tokens a second are worth what draft tokens cost beside their rows."""

    def num_drafts(self, num_taken: int) -> list[int]:
        """Return how many candidates of each slot are verified, of so many offers."""
        num_drafts = list(self.required)
        for _, place in self.offers[:num_taken]:
            num_drafts[place] += 1
        return num_drafts


class VerifyBudget:
    """The draft tokens that the steps of one target may verify."""

    def __init__(self) -> None:
        self.cost = RowCost()
        self._callers = RowBudget[_Item](self.cost)
        self._num_chosen = 0
        self._pays = True
        """Whether the last candidates that might have been passed over were not: of all slots, or of the bounding
        caller's as if it were alone."""
        self._bounding_gain: float | None = None
        """Tokens that the step is expected to bring the bounding caller; None where nobody is bounded."""
        self._rate = 0.0
        """Tokens a second that all slots gain together, or the bounding caller's."""

    def note(self, num_rows: int, num_tokens: int, seconds: float, between_s: float = 0.0) -> None:
        """Record a step without prompts: what it was fed, and how many tokens it committed. between_s: what passed
        since the one before, or since somebody was ready.
        """
        self.cost.note(num_rows, seconds)
        self._callers.note(seconds, between_s)
        rate = num_tokens / seconds
        if self._bounding_gain is not None:
            rate = self._bounding_gain / (seconds + between_s)
        self._rate += _RATE_WEIGHT * (rate - self._rate)

    # what is verified

    def choose(
        self, demands: Sequence[VerifyDemand], max_rows: int, max_extra_rows: int, absent: Iterable[Scheduling]
    ) -> list[VerifyChoice | None]:
        """Return what is verified of each slot; None for one that waits for the next step.

        max_rows: of draft tokens and extra rows in all; max_extra_rows: of the latter and what they pay for. absent: of
        slots that are not ready and soon will be.
        """
        self._num_chosen += 1
        is_probe = self._num_chosen % PROBE_STEPS == 0
        has_extra = self._choose_extra(demands, min(max_rows, max_extra_rows), is_probe)
        slots = list[_Slot]()
        for index, demand in enumerate(demands):
            extra_rows = demand.extra_rows if has_extra[index] else 0
            max_rows -= extra_rows
            slots.append(_Slot(index, demand, demand.num_pending + extra_rows))
        plan = self._plan(slots, max_rows)
        num_drafts = plan.num_drafts(plan.num_taken // 2 if is_probe else plan.num_taken)
        choices: list[VerifyChoice | None] = [None] * len(slots)
        for index, num in self._share_out(slots, num_drafts, plan, max_rows, absent):
            choices[index] = VerifyChoice(num, has_extra[index])
        return choices

    def _choose_extra(self, demands: Sequence[VerifyDemand], max_rows: int, is_probe: bool) -> list[bool]:
        """Return whose extra rows are fed: of slots that name how many draft tokens are verified, and of those with
        which the most tokens a second are made, if together they make MIN_GAIN times as many as without.
        """
        has_extra = [False] * len(demands)
        offers = list[tuple[float, int]]()
        num_rows = 0
        for index, demand in enumerate(demands):
            num_rows += demand.num_pending
            if demand.extra_rows and not demand.is_fixed:
                offers.append((-demand.extra_gain / demand.extra_cost_rows, index))
            elif demand.extra_rows and demand.extra_cost_rows <= max_rows:
                has_extra[index] = True
                max_rows -= demand.extra_cost_rows
        if is_probe:
            return has_extra
        gain = float(len(demands))
        num_taken = 0
        max_rate = MIN_GAIN * gain / self._seconds(num_rows)
        max_rows = num_rows + max_rows
        offers.sort()
        for count, (_, index) in enumerate(offers, start=1):
            gain += demands[index].extra_gain
            num_rows += demands[index].extra_cost_rows
            if num_rows > max_rows or (count > 1 and num_rows > self.cost.reach):
                break
            rate = gain / self._seconds(num_rows)
            if rate >= max_rate:
                num_taken, max_rate = count, rate
        for _, index in offers[:num_taken]:
            has_extra[index] = True
        return has_extra

    def _plan(self, slots: Sequence[_Slot], max_rows: int) -> _Plan:
        """Return what would be verified, if nothing were tried out."""
        plan = _Plan([0] * len(slots), sum(slot.num_rows for slot in slots), float(len(slots)))
        offers = list[tuple[float, int]]()
        # Who needs the fewest rows goes first.
        for place in sorted(range(len(slots)), key=lambda place: slots[place].demand.max_rows):
            demand = slots[place].demand
            if not demand.num_required:
                offers += [(prob, place) for prob in demand.probs]
            elif demand.max_rows <= max_rows:
                plan.required[place] = demand.num_required
                plan.num_rows += demand.num_required
                plan.gain += demand.gain(demand.num_required) - 1.0
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
        limits_s: dict[int, float] = {}
        max_step_s: dict[int, float] = {}  # with the tokens that the slot is expected to have of the step
        for place, (_, demand, _) in enumerate(slots):
            if demand.scheduling.max_tpot_ms is not None:
                limit_s = demand.scheduling.max_tpot_ms / 1e3
                step_s = limit_s * demand.gain(plan.required[place])
                if self._seconds(max(1, plan.num_rows)) <= step_s:
                    limits_s[place], max_step_s[place] = limit_s, step_s
        if not limits_s:
            return num_taken
        best, min_step_s = 0, min(max_step_s.values())
        for count, (prob, place) in enumerate(plan.offers[:num_taken], start=1):
            if place in limits_s:
                max_step_s[place] += prob * limits_s[place]
                min_step_s = min(max_step_s.values())
            if self._seconds(plan.num_rows + count) <= min_step_s:
                best = count
        return best

    def _seconds(self, num_rows: int) -> float:
        """Return what a step takes; of all steps the same while nothing is known."""
        return self.cost.seconds(num_rows) or 1.0

    # callers

    def _share_out(
        self,
        slots: Sequence[_Slot],
        num_drafts: Sequence[int],
        plan: _Plan,
        max_rows: int,
        absent: Iterable[Scheduling],
    ) -> Sequence[_Item]:
        """Return the slots of the step, and how many candidates are verified of each, where all callers are to have
        their part. num_drafts: where nobody is bounded.
        """
        callers: dict[bytes, list[_Slot]] = {}
        for slot in slots:
            callers.setdefault(slot.demand.scheduling.caller, []).append(slot)
        away_weights = {each.caller: each.weight for each in absent if each.caller not in callers}
        parts = list[CallerPart[_Item]]()
        if len(callers) + len(away_weights) > 1:
            parts += [self._part(own, num_drafts, max_rows) for own in callers.values()]
            parts += [away(caller, weight) for caller, weight in away_weights.items()]
        dealt = self._callers.deal(parts)
        self._bounding_gain = None
        if dealt is None:
            dealt = list(enumerate(num_drafts))
        else:
            bounding = callers.get(self._callers.bounding or b"", [])
            plan = self._plan(bounding, max_rows)
            gains = {slot.index: slot.demand.gain for slot in bounding}
            self._bounding_gain = 0.0
            for index, num in dict(dealt).items():  # of one slot the last
                if index in gains:
                    self._bounding_gain += gains[index](num)
        if plan.offers:
            self._pays = plan.pays
        return dealt

    def _part(self, slots: Sequence[_Slot], num_drafts: Sequence[int], max_rows: int) -> CallerPart[_Item]:
        """Return the part of a caller whose slots these are. num_drafts: of all slots."""
        scheduling = slots[-1].demand.scheduling
        gain, max_gain, num_rows, min_rows = 0.0, 0.0, 0, 0
        for index, demand, own_rows in slots:
            min_rows += own_rows
            num_rows += own_rows + demand.num_rows(num_drafts[index])
            gain += demand.gain(num_drafts[index])
            max_gain += demand.gain(len(demand.probs))
        alone = partial(self._alone, slots, max_rows)
        return CallerPart(scheduling.caller, scheduling.weight, gain, num_rows, max_gain, min_rows, alone)

    def _alone(self, slots: Sequence[_Slot], max_rows: int) -> Alone[_Item]:
        """Return all slots of a caller without candidates, by priority and then by when they were ready, and behind
        them these, the likeliest first.
        """
        plan = self._plan(slots, max_rows)
        drafts = list[tuple[float, int, Unit[_Item]]]()
        gain = 0.0
        for (index, demand, _), num_drafts in zip(slots, plan.num_drafts(plan.num_taken), strict=True):
            gain += demand.gain(num_drafts)
            if num_drafts and demand.is_whole:
                mean = (demand.gain(num_drafts) - 1.0) / demand.max_rows
                drafts.append((-mean, 0, Unit((index, num_drafts), demand.max_rows)))
                continue
            least = 1.0
            for place, prob in enumerate(demand.probs[:num_drafts], start=1):
                least = min(least, prob)  # what comes first stays first
                drafts.append((-least, place, Unit((index, place), 1)))
        drafts.sort()
        plain = sorted(slots, key=lambda slot: (slot.demand.scheduling.priority, slot.demand.ready_s))
        units = [Unit((slot.index, 0), slot.num_rows) for slot in plain]
        return Alone(gain, units + [unit for _, _, unit in drafts])

    # waiting

    def awaited(self, pending: Sequence[PendingDraft]) -> Sequence[PendingDraft]:
        """Return by whose next tokens a step may be held: where steps are bounded, by those of the bounding caller."""
        if self._callers.bounding is None:
            return pending
        return [draft for draft in pending if draft.lease.slot.scheduling.caller == self._callers.bounding]

    def hold_until(self, awaited: Sequence[PendingDraft], now: float) -> float | None:
        """Return until when the step waits for those; None to go at once, as ever while draft tokens do not pay. Where
        steps are bounded, as if the bounding caller were alone: what a wait costs is counted in its own tokens.
        """
        return hold_until(awaited, now, self._rate) if self._pays else None
