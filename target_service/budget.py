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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.engine.speculation.row_budget import CallerPart, RowBudget, Unit
from outrider.engine.speculation.row_cost import RowCost
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


_Demands = Mapping[int, VerifyDemand]
"""Demands by the indices of their slots."""


class _Offer(NamedTuple):
    """Rows that are verified or fed together, or not at all."""

    index: int
    """Of the slot."""
    gain: float
    """Tokens that are expected of them."""
    num_rows: int


class _Plan(NamedTuple):
    """The draft tokens that some slots would have verified together."""

    required: Mapping[int, int]
    """Number of candidates of each slot, by its index."""
    taken: Sequence[_Offer]
    """The draft tokens of others, best first."""
    has_offers: bool
    """Whether there were some that might have been passed over."""

    def num_drafts(self, num_taken: int) -> dict[int, int]:
        """Return how many candidates of each slot are verified, with so many of those that are taken."""
        num_drafts = dict(self.required)
        for offer in self.taken[:num_taken]:
            num_drafts[offer.index] += 1
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
        by_index = dict(enumerate(demands))
        extra = self._choose_extra(by_index, min(max_rows, max_extra_rows), is_probe)
        for index in extra:
            demand = demands[index]
            max_rows -= demand.extra_rows
            by_index[index] = replace(demand, num_pending=demand.num_pending + demand.extra_rows)
        plan = self._plan(by_index, max_rows)
        num_taken = len(plan.taken) // 2 if is_probe else len(plan.taken)
        num_drafts = self._share_out(by_index, plan, num_taken, max_rows, absent)
        choices: list[VerifyChoice | None] = [None] * len(demands)
        for index, num in num_drafts.items():
            choices[index] = VerifyChoice(num, index in extra)
        return choices

    def _choose_extra(self, demands: _Demands, max_rows: int, is_probe: bool) -> set[int]:
        """Return whose extra rows are fed: of slots that name how many draft tokens are verified, as far as there is
        room, and of others as far as they pay.
        """
        chosen = set[int]()
        offers = list[_Offer]()
        for index, demand in demands.items():
            if demand.extra_rows and not demand.is_fixed:
                offers.append(_Offer(index, demand.extra_gain, demand.extra_cost_rows))
            elif demand.extra_rows and demand.extra_cost_rows <= max_rows:
                chosen.add(index)
                max_rows -= demand.extra_cost_rows
        if offers and not is_probe:
            num_rows = sum(demand.num_pending for demand in demands.values())
            for offer in self._best(offers, demands, dict.fromkeys(demands, 1.0), num_rows, max_rows):
                chosen.add(offer.index)
        return chosen

    def _plan(self, demands: _Demands, max_rows: int) -> _Plan:
        """Return what would be verified, if nothing were tried out."""
        required, gains = dict.fromkeys(demands, 0), dict.fromkeys(demands, 1.0)
        offers = list[_Offer]()
        num_rows = 0
        for index, demand in sorted(demands.items(), key=lambda item: item[1].max_rows):  # who needs the fewest first
            num_rows += demand.num_pending
            if not demand.num_required:
                offers += [_Offer(index, prob, 1) for prob in demand.probs]
            elif demand.max_rows <= max_rows:
                required[index] = demand.num_required
                gains[index] = demand.gain(demand.num_required)
                num_rows += demand.num_required
                max_rows -= demand.max_rows
        return _Plan(required, self._best(offers, demands, gains, num_rows, max_rows), bool(offers))

    def _best(
        self, offers: list[_Offer], demands: _Demands, gains: dict[int, float], num_rows: int, max_rows: int
    ) -> Sequence[_Offer]:
        """Return the offers with which the most tokens a second are made, best first, none unless that is MIN_GAIN
        times as many as without. They keep to what slots say how long a token may take, but for those that no step
        would keep to.

        gains: tokens that are expected of each slot without them; num_rows: rows of the step without them; max_rows:
        theirs in all.
        """
        gain = sum(gains.values())
        step_s = self.cost.seconds(max(1, num_rows)) or 1.0  # of all steps the same while nothing is known
        limits_s: dict[int, float] = {}
        for index, demand in demands.items():
            limit_ms = demand.scheduling.max_tpot_ms
            if limit_ms is not None and step_s <= limit_ms / 1e3 * gains[index]:
                limits_s[index] = limit_ms / 1e3
        num_best, max_rate = 0, MIN_GAIN * gain / step_s
        max_rows += num_rows
        offers.sort(key=lambda offer: -offer.gain / offer.num_rows)
        for count, offer in enumerate(offers, start=1):
            num_rows += offer.num_rows
            if num_rows > max_rows or (count > 1 and num_rows > self.cost.reach):
                break
            gain += offer.gain
            gains[offer.index] += offer.gain
            step_s = self.cost.seconds(num_rows) or 1.0
            if gain / step_s > max_rate and all(step_s <= limit_s * gains[i] for i, limit_s in limits_s.items()):
                num_best, max_rate = count, gain / step_s
        return offers[:num_best]

    # callers

    def _share_out(
        self, demands: _Demands, plan: _Plan, num_taken: int, max_rows: int, absent: Iterable[Scheduling]
    ) -> dict[int, int]:
        """Return how many candidates are verified of each slot of the step where all callers are to have their part,
        by its index. num_taken: of the plan, where nobody is bounded.
        """
        num_drafts = plan.num_drafts(num_taken)
        callers: dict[bytes, dict[int, VerifyDemand]] = {}
        for index, demand in demands.items():
            callers.setdefault(demand.scheduling.caller, {})[index] = demand
        away = {each.caller: each.weight for each in absent if each.caller not in callers}
        parts = [CallerPart[_Item](caller, weight) for caller, weight in away.items()]
        for caller, own in callers.items():
            if len(callers) + len(away) == 1:
                break  # nobody to share with
            gain, num_rows, weight = 0.0, 0, 1.0
            for index, demand in own.items():
                gain += demand.gain(num_drafts[index])
                num_rows += demand.num_pending + demand.num_rows(num_drafts[index])
                weight = demand.scheduling.weight
            parts.append(CallerPart(caller, weight, gain, num_rows, *self._alone(own, max_rows)))
        dealt = self._callers.deal(parts)
        self._bounding_gain = None
        if dealt is not None:
            num_drafts = dict(dealt)  # of one slot the last
            bounding = callers.get(self._callers.bounding or b"", {})
            plan = self._plan(bounding, max_rows)
            self._bounding_gain = sum(
                own.gain(num_drafts[index]) for index, own in bounding.items() if index in num_drafts
            )
        if plan.has_offers:
            self._pays = bool(plan.taken)
        return num_drafts

    def _alone(self, demands: _Demands, max_rows: int) -> tuple[float, Sequence[Unit[_Item]]]:
        """Return the tokens that are expected of a caller's step alone, and what is in it: all its slots without
        candidates, by priority and then by when they were ready, and behind them these, the likeliest first.
        """
        plan = self._plan(demands, max_rows)
        plain, drafts = list[tuple[int, float, Unit[_Item]]](), list[tuple[float, int, Unit[_Item]]]()
        gain = 0.0
        for index, num_drafts in plan.num_drafts(len(plan.taken)).items():
            demand = demands[index]
            gain += demand.gain(num_drafts)
            plain.append((demand.scheduling.priority, demand.ready_s, Unit((index, 0), demand.num_pending)))
            if num_drafts and demand.is_whole:
                mean = sum(demand.probs) / demand.max_rows
                drafts.append((-mean, 0, Unit((index, num_drafts), demand.max_rows)))
                continue
            least = 1.0
            for place, prob in enumerate(demand.probs[:num_drafts], start=1):
                least = min(least, prob)  # what comes first stays first
                drafts.append((-least, place, Unit((index, place), 1)))
        return gain, [unit for *_, unit in (*sorted(plain), *sorted(drafts))]

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
