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

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from outrider.engine.speculation.row_budget import RowBudget, Unit
from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import MIN_GAIN
from target_service.leases.hold import PendingDraft, hold_until

PROBE_STEPS = 16
"""Steps of which one takes half the rows that seem best, and no extra ones, so that what fewer rows take stays known:
they are passed over for a first step that was slow."""
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

    def part(self, num_drafts: int) -> tuple[bytes, float, int]:
        """Return the caller, and the expected tokens and the number of rows of the slot's part of a step with so many
        candidates.
        """
        if num_drafts and self.is_whole:
            gain = sum(self.probs)
            num_rows = self.max_rows
        else:
            gain = sum(self.probs[:num_drafts])
            num_rows = num_drafts
        return self.scheduling.caller, 1.0 + gain, self.num_pending + num_rows


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
    """What is verified where nobody is bounded."""

    num_drafts: dict[int, int]
    """Candidates of each slot, by its index."""
    has_offers: bool
    """There are candidates that may be passed over."""
    pays: bool
    """Some of these are worth their rows."""


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
        num_drafts = self._share_out(by_index, max_rows, absent, is_probe)
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

    def _plan(self, demands: _Demands, max_rows: int, is_probe: bool = False) -> _Plan:
        """Return what is verified where nobody is bounded. is_probe: half of the candidates that pay are verified."""
        num_drafts = dict.fromkeys(demands, 0)
        gains = dict.fromkeys(demands, 1.0)
        offers = list[_Offer]()
        num_rows = 0
        for index, demand in sorted(demands.items(), key=lambda item: item[1].max_rows):  # who needs the fewest first
            num_rows += demand.num_pending
            if not demand.num_required:
                offers += [_Offer(index, prob, 1) for prob in demand.probs]
            elif demand.max_rows <= max_rows:
                num_drafts[index] = demand.num_required
                gains[index] = demand.part(demand.num_required)[1]
                num_rows += demand.num_required
                max_rows -= demand.max_rows
        if not offers:
            return _Plan(num_drafts, has_offers=False, pays=False)
        best = self._best(offers, demands, gains, num_rows, max_rows)
        num_taken = len(best) // 2 if is_probe else len(best)
        for offer in best[:num_taken]:
            num_drafts[offer.index] += 1
        return _Plan(num_drafts, has_offers=True, pays=bool(best))

    def _best(
        self, offers: list[_Offer], demands: _Demands, gains: Mapping[int, float], num_rows: int, max_rows: int
    ) -> Sequence[_Offer]:
        """Return the offers with which the most tokens a second are made, best first, none unless that is MIN_GAIN
        times as many as without. They keep to what slots say how long a token may take, but for those that no step
        would keep to.

        gains: tokens that are expected of each slot without them; num_rows: rows of the step without them; max_rows:
        theirs in all.
        """
        offers.sort(key=lambda offer: -offer.gain / offer.num_rows)
        # Of steps with none, one, two .. of the offers, as far as there is room.
        rows = list(accumulate((offer.num_rows for offer in offers), initial=num_rows))
        num_steps = bisect_right(rows, min(num_rows + max_rows, max(rows[1], self.cost.reach)))
        offers = offers[: num_steps - 1]
        step_s = self.cost.seconds(rows[:num_steps])  # [N + 1]
        tokens = accumulate((offer.gain for offer in offers), initial=sum(gains.values()))
        rates = np.array(list(tokens)) / step_s
        rates[0] *= MIN_GAIN
        for index, demand in demands.items():
            limit_ms = demand.scheduling.max_tpot_ms
            if limit_ms is not None and step_s[0] <= limit_ms / 1e3 * gains[index]:
                own = [offer.gain * (offer.index == index) for offer in offers]
                rates[step_s > limit_ms / 1e3 * np.cumsum([gains[index], *own])] = 0.0
        return offers[: int(rates.argmax())]

    # callers

    def _share_out(
        self, demands: _Demands, max_rows: int, absent: Iterable[Scheduling], is_probe: bool
    ) -> dict[int, int]:
        """Return how many candidates are verified of each slot of the step where all callers are to have their part, by
        its index.
        """
        plan = self._plan(demands, max_rows, is_probe)
        num_drafts = plan.num_drafts
        weights = {scheduling.caller: scheduling.weight for scheduling in absent}
        callers: dict[bytes, dict[int, VerifyDemand]] = {}
        for index, demand in demands.items():
            weights[demand.scheduling.caller] = demand.scheduling.weight
            callers.setdefault(demand.scheduling.caller, {})[index] = demand
        step = (demand.part(num_drafts[index]) for index, demand in demands.items())
        dealt = self._callers.deal(weights, step, lambda caller: self._alone(callers.get(caller, {}), max_rows))
        self._bounding_gain = None
        if dealt is not None:
            num_drafts = dict(dealt)  # of one slot the last
            bounding = callers.get(self._callers.bounding or b"", {})
            plan = self._plan(bounding, max_rows)
            self._bounding_gain = 0.0
            for index in bounding.keys() & num_drafts.keys():
                self._bounding_gain += bounding[index].part(num_drafts[index])[1]
        if plan.has_offers:
            self._pays = plan.pays
        return num_drafts

    def _alone(self, demands: _Demands, max_rows: int) -> list[Unit[_Item]]:
        """Return what is in a caller's step alone: all its slots without candidates, by priority and then by when they
        were ready, and behind them these, the likeliest first.
        """
        plain = list[tuple[int, float, Unit[_Item]]]()
        drafts = list[tuple[float, int, Unit[_Item]]]()
        for index, num_drafts in self._plan(demands, max_rows).num_drafts.items():
            demand = demands[index]
            plain.append((demand.scheduling.priority, demand.ready_s, Unit((index, 0), 1.0, demand.num_pending)))
            if num_drafts and demand.is_whole:
                gain = sum(demand.probs)
                drafts.append((-gain / demand.max_rows, 0, Unit((index, num_drafts), gain, demand.max_rows)))
                continue
            least = 1.0
            for place, prob in enumerate(demand.probs[:num_drafts], start=1):
                least = min(least, prob)  # what comes first stays first
                drafts.append((-least, place, Unit((index, place), prob, 1)))
        return [unit for *_, unit in (*sorted(plain), *sorted(drafts))]

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
