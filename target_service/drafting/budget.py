"""The budget of a step: how many draft tokens of each slot it verifies, and whether it waits for some.

Draft tokens are taken best first, as long as the step then makes more tokens a second, by the measured seconds of steps
with so many rows, and only if together they make MIN_GAIN times as many. Under load no row is worth it any more and the
step is plain, so that nothing is slower with draft tokens than without. A request that fixes the number of its draft
tokens gets them whatever they cost. If a request limits the time per token, draft tokens of any slot are left out to
keep the limit. Extra rows, which a drafter adds to a step to make draft tokens for later steps, are taken if the tokens
that they bring pay for these rows and for the draft tokens made from them.

A caller that would slow another by more than its share is bounded (`outrider.engine.speculation.row_budget`): its draft
tokens are left out first, even if a request fixes their number, then whole slots, the latest first. The step is then
held for draft tokens of the bounding caller alone, if they are worth the wait to that caller.

Exactness: what is verified of a slot depends on clocks, probabilities, distributions, and rows of earlier steps, never
on the tokens that were drawn to be verified in this one. The size of a sampled tree of a requested shape may depend on
the drawn tokens, so it counts with its maximum size, and is verified as a whole or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from outrider.engine.speculation.row_budget import BudgetUnit, RowBudget
from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import MIN_GAIN
from target_service.leases.hold import PendingDraft, hold_until

PROBE_STEPS = 16
"""Every PROBE_STEPS-th step is made smaller, to measure its duration: it verifies only half of the draft tokens that
pay, and has extra rows only for requests that fix the number of draft tokens."""
_RATE_WEIGHT = 0.25
"""Weight of a step in the moving mean of tokens per second."""

_Item = tuple[int, int]
"""(index of a slot, number of its candidates to verify, from the first on)."""


@dataclass(frozen=True, slots=True)
class VerifyDemand:
    """What the budget knows about one slot when it chooses how many of the slot's draft tokens a step verifies. It does
    not depend on which tokens were sampled.
    """

    probs: Sequence[float] = ()
    """Acceptance probabilities of the draft tokens that the step might verify, best first. For a tree whose size may
    depend on its sampled tokens, entry d - 1 is that of one draft token at depth d."""
    num_required: int = 0
    """If the request fixes the number of draft tokens: number of the slot's draft tokens to verify, whatever they cost.
    0 = the budget verifies those that pay."""
    max_rows: int = 0
    """Maximum number of rows that the `num_required` draft tokens may take. It exceeds num_required for a tree whose
    size may depend on its sampled tokens: the tree counts with its maximum size."""
    is_whole: bool = False
    """Whether the `num_required` draft tokens are verified all together or not at all."""
    is_fixed: bool = False
    """Whether the request fixes the number of draft tokens that a step verifies."""
    num_pending: int = 1
    """Number of rows that the slot has in a step without draft tokens; usually 1, for its last committed token."""
    extra_rows: int = 0
    """Number of extra rows that the slot's drafter would add to this step to make draft tokens for later steps. They
    are not verified."""
    extra_gain: float = 0.0
    """Expected number of draft tokens per step that are made by the slot's extra rows and later accepted."""
    extra_cost_rows: int = 0
    """Number of rows whose cost is compared with `extra_gain`: the extra rows, plus the slot's candidates if extra rows
    of earlier steps made all of them."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """Caller, weight and priority of the request, and its limit on the time per output token."""
    ready_s: float = 0.0
    """Monotonic time, in seconds, since which the slot has been ready."""

    def part(self, num_draft_tokens: int) -> tuple[bytes, float, int]:
        """Return what the slot adds to a step that verifies its first num_draft_tokens draft tokens: (caller, expected
        number of tokens that the step commits for the slot, number of the slot's rows in the step).
        """
        if num_draft_tokens and self.is_whole:
            gain = sum(self.probs)
            num_rows = self.max_rows
        else:
            gain = sum(self.probs[:num_draft_tokens])
            num_rows = num_draft_tokens
        return self.scheduling.caller, 1.0 + gain, self.num_pending + num_rows


class VerifyChoice(NamedTuple):
    """Decision of the budget about one slot in one step."""

    num_draft_tokens: int
    """Number of the slot's candidate draft tokens to verify, counted from the first."""
    with_extra_rows: bool
    """Whether the step has the extra rows that the slot's drafter asks for."""


_Demands = Mapping[int, VerifyDemand]
"""What the budget knows about each slot of a step, by the slot's index."""


class _RowGroup(NamedTuple):
    """Rows of one slot that are taken together or not at all."""

    index: int
    """Index of the slot in the argument `demands` of `VerifyBudget.choose`."""
    gain: float
    """Number of additional tokens that the step is expected to commit if it has these rows."""
    num_rows: int


class _Plan(NamedTuple):
    """The choice for a step in which no caller is bounded."""

    num_draft_tokens: dict[int, int]
    """Number of draft tokens to verify of each slot, by the slot's index in the argument `demands` of
    `VerifyBudget.choose`."""
    has_optional_drafts: bool
    """Whether there are draft tokens that the budget may leave out."""
    is_worthwhile: bool
    """Whether any draft token that the budget may leave out is worth its rows."""


class VerifyBudget:
    """Budget of one target's steps: `note` records the cost of steps, `choose` decides what the next step verifies."""

    def __init__(self) -> None:
        self.cost = RowCost()
        self._callers = RowBudget[_Item](self.cost)
        self._num_chosen = 0
        self._is_worthwhile = True
        """Whether, in the last step with such candidates, some that could be left out were worth their rows. If a
        caller was bounded: whether that held for the bounding caller alone."""
        self._bounding_gain: float | None = None
        """Expected number of tokens of the bounding caller in the step; None if no caller is bounded."""
        self._rate = 0.0
        """Moving mean of tokens per second, of all slots together, or of the bounding caller's slots."""

    def note(self, num_rows: int, num_tokens: int, seconds: float, between_s: float = 0.0) -> None:
        """Record the cost of a step in which no prompt was prefilled.

        num_rows: number of the step's rows. num_tokens: number of tokens that the step committed. seconds: duration of
        the step. between_s: seconds of preparation before the step: since the previous step ended or, if the engine
        thread waited after that, since the wait ended.
        """
        self.cost.note(num_rows, seconds)
        self._callers.note(seconds, between_s)
        rate = num_tokens / seconds
        if self._bounding_gain is not None:
            rate = self._bounding_gain / (seconds + between_s)
        self._rate += _RATE_WEIGHT * (rate - self._rate)

    # the choice

    def choose(
        self, demands: Sequence[VerifyDemand], max_rows: int, max_extra_rows: int, absent: Iterable[Scheduling]
    ) -> list[VerifyChoice | None]:
        """Return, for each slot in the order of `demands`, what the next step verifies of the slot; None for a slot
        that the step leaves out.

        max_rows: maximum number of draft tokens and extra rows of all slots together. max_extra_rows: maximum sum of
        `extra_cost_rows` of the slots that get extra rows. absent: scheduling of requests whose slots are likely to be
        ready soon; the step's rows are limited so that it ends in time for their callers to get their shares of the
        target's time.
        """
        self._num_chosen += 1
        is_probe = self._num_chosen % PROBE_STEPS == 0
        by_index = dict(enumerate(demands))
        extra = self._choose_extra(by_index, min(max_rows, max_extra_rows), is_probe)
        for index in extra:
            demand = demands[index]
            max_rows -= demand.extra_rows
            by_index[index] = replace(demand, num_pending=demand.num_pending + demand.extra_rows)
        num_draft_tokens = self._share_out(by_index, max_rows, absent, is_probe)
        choices: list[VerifyChoice | None] = [None] * len(demands)
        for index, num in num_draft_tokens.items():
            choices[index] = VerifyChoice(num, index in extra)
        return choices

    def _choose_extra(self, demands: _Demands, max_rows: int, is_probe: bool) -> set[int]:
        # Slots that name how many draft tokens are verified have extra rows as far as there is room, others where
        # these pay.
        chosen = set[int]()
        row_groups = list[_RowGroup]()
        num_rows = 0
        for index, demand in demands.items():
            num_rows += demand.num_pending
            if demand.extra_rows and not demand.is_fixed:
                row_groups.append(_RowGroup(index, demand.extra_gain, demand.extra_cost_rows))
            elif demand.extra_rows and demand.extra_cost_rows <= max_rows:
                chosen.add(index)
                max_rows -= demand.extra_cost_rows
        if row_groups and not is_probe:
            for row_group in self._best(row_groups, demands, dict.fromkeys(demands, 1.0), num_rows, max_rows):
                chosen.add(row_group.index)
        return chosen

    def _plan(self, demands: _Demands, max_rows: int, is_probe: bool = False) -> _Plan:
        # is_probe: half of the candidates that pay are verified
        num_draft_tokens = dict.fromkeys(demands, 0)
        gains = dict.fromkeys(demands, 1.0)
        row_groups = list[_RowGroup]()
        num_rows = 0
        for index, demand in sorted(demands.items(), key=lambda item: item[1].max_rows):  # the fewest rows first
            num_rows += demand.num_pending
            if not demand.num_required:
                for prob in demand.probs:
                    row_groups.append(_RowGroup(index, prob, 1))
            elif demand.max_rows <= max_rows:
                num_draft_tokens[index] = demand.num_required
                gains[index] = demand.part(demand.num_required)[1]
                num_rows += demand.num_required
                max_rows -= demand.max_rows
        if not row_groups:
            return _Plan(num_draft_tokens, has_optional_drafts=False, is_worthwhile=False)
        best = self._best(row_groups, demands, gains, num_rows, max_rows)
        num_taken = len(best)
        if is_probe:
            num_taken //= 2
        for row_group in best[:num_taken]:
            num_draft_tokens[row_group.index] += 1
        return _Plan(num_draft_tokens, has_optional_drafts=True, is_worthwhile=bool(best))

    def _best(
        self, row_groups: list[_RowGroup], demands: _Demands, gains: Mapping[int, float], num_rows: int, max_rows: int
    ) -> Sequence[_RowGroup]:
        """Return those groups of rows with which the step makes the most tokens a second, best first; none if that is
        less than MIN_GAIN times the rate without them.

        gains: expected tokens of each slot without the groups. num_rows: rows of the step without the groups. max_rows:
        maximum number of rows of the groups.

        Example: one slot; groups of one row with gains 0.8, 0.5 and 0.1; steps of 1 to 4 rows take 10, 11, 12 and 13
        ms. 1.0, 1.8, 2.3 and 2.4 tokens are 100, 164, 192 and 185 a second, so the first two groups are taken.
        """
        row_groups.sort(key=lambda row_group: -row_group.gain / row_group.num_rows)
        rows = [num_rows]  # of steps with none, one, two .. of the offers
        for row_group in row_groups:
            rows.append(rows[-1] + row_group.num_rows)
        num_steps = bisect_right(rows, min(num_rows + max_rows, max(rows[1], self.cost.reach)))
        row_groups = row_groups[: num_steps - 1]
        tokens = [sum(gains.values())]
        for row_group in row_groups:
            tokens.append(tokens[-1] + row_group.gain)
        step_s = self.cost.seconds(rows[:num_steps])  # [N + 1] float64
        rates = np.array(tokens) / step_s  # [N + 1] float64
        rates[0] *= MIN_GAIN
        for index, demand in demands.items():
            limit_ms = demand.scheduling.max_tpot_ms
            # A limit that not even the step without offers keeps binds nobody.
            if limit_ms is not None and step_s[0] <= limit_ms / 1e3 * gains[index]:
                own = [gains[index]]
                for row_group in row_groups:
                    own.append(row_group.gain * (row_group.index == index))
                rates[step_s > limit_ms / 1e3 * np.cumsum(own)] = 0.0
        return row_groups[: int(rates.argmax())]

    # callers

    def _share_out(
        self, demands: _Demands, max_rows: int, absent: Iterable[Scheduling], is_probe: bool
    ) -> dict[int, int]:
        # By slot index, the candidates that are verified; a slot that is missing waits for the next step.
        plan = self._plan(demands, max_rows, is_probe)
        num_draft_tokens = plan.num_draft_tokens
        weights = dict[bytes, float]()
        for scheduling in absent:
            weights[scheduling.caller] = scheduling.weight
        callers: dict[bytes, dict[int, VerifyDemand]] = {}
        for index, demand in demands.items():
            weights[demand.scheduling.caller] = demand.scheduling.weight
            callers.setdefault(demand.scheduling.caller, {})[index] = demand
        step = (demand.part(num_draft_tokens[index]) for index, demand in demands.items())
        dealt = self._callers.deal(weights, step, lambda caller: self._alone(callers.get(caller, {}), max_rows))
        self._bounding_gain = None
        if dealt is not None:
            # (0, 0), (0, 1), (1, 0), (0, 2) -> {0: 2, 1: 0}: of a slot the last item counts
            num_draft_tokens = dict(dealt)
            bounding = callers.get(self._callers.bounding or b"", {})
            plan = self._plan(bounding, max_rows)
            self._bounding_gain = 0.0
            for index in bounding.keys() & num_draft_tokens.keys():
                self._bounding_gain += bounding[index].part(num_draft_tokens[index])[1]
        if plan.has_optional_drafts:
            self._is_worthwhile = plan.is_worthwhile
        return num_draft_tokens

    def _alone(self, demands: _Demands, max_rows: int) -> list[BudgetUnit[_Item]]:
        # The units of the step that a caller would take alone: first its slots without candidates, by priority and
        # then by the time at which they were ready, then their candidates, the likeliest first.
        plain = list[tuple[int, float, BudgetUnit[_Item]]]()
        drafts = list[tuple[float, int, BudgetUnit[_Item]]]()
        for index, num_draft_tokens in self._plan(demands, max_rows).num_draft_tokens.items():
            demand = demands[index]
            plain.append((demand.scheduling.priority, demand.ready_s, BudgetUnit((index, 0), 1.0, demand.num_pending)))
            if num_draft_tokens and demand.is_whole:
                gain = sum(demand.probs)
                drafts.append(
                    (-gain / demand.max_rows, 0, BudgetUnit((index, num_draft_tokens), gain, demand.max_rows))
                )
                continue
            min_prob = 1.0
            for num, prob in enumerate(demand.probs[:num_draft_tokens], start=1):
                min_prob = min(min_prob, prob)  # a slot's first candidate stays before its second
                drafts.append((-min_prob, num, BudgetUnit((index, num), prob, 1)))
        plain.sort()
        drafts.sort()
        units = list[BudgetUnit[_Item]]()
        for _, _, unit in plain:
            units.append(unit)
        for _, _, unit in drafts:
            units.append(unit)
        return units

    # waiting

    def awaited(self, pending: Sequence[PendingDraft]) -> Sequence[PendingDraft]:
        """Return those of the pending draft workers for which a step may wait: all of them; or, if the last step's time
        was limited so that one caller gets its share of the target's time, those of that caller's slots.
        """
        if self._callers.bounding is None:
            return pending
        return [draft for draft in pending if draft.lease.slot.scheduling.caller == self._callers.bounding]

    def hold_until(self, awaited: Sequence[PendingDraft], now: float) -> float | None:
        """Return the monotonic time, in seconds, until which the step waits for draft tokens of these draft workers;
        None if it does not wait.

        It does not wait if, in the last step with draft tokens that the budget may leave out, none of these was worth
        its rows. awaited: result of the method `awaited`. now: monotonic time, in seconds.
        """
        if not self._is_worthwhile:
            return None
        return hold_until(awaited, now, self._rate)
