"""Decides which draft tokens a step verifies, over all slots and gateways together, and whether it waits for some.

Rows are taken best first for as long as they make more tokens a second, by what steps of so many rows take on this
machine, if together they make LEAST_GAIN times as many. Under load no row is worth it any more, and the step is plain:
that nothing is slower with drafts than without follows from this rule. A request that names how much is verified gets
that whatever it costs. Where a slot says how long a token may take, drafts of all are left out for it.

Tokens that a drafter has fed beside the drafts, for later steps' sake, are rows like any. They are taken where the
tokens that such drafts brought a step pay for them and for the drafts that came of them.

A step is held for guesses while those that are missing are worth more than the tokens that the wait costs. A slot
whose request names how much is verified waits longer by itself, while the others go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.engine.speculation.row_cost import RowCost, best_count
from target_service.lease import DeliveredDrafts as Delivered
from target_service.lease import Lease

Candidates = Any

MOST_HOLD_S = 1.0
"""Seconds that a request which names how much is verified waits for it at most. Doubling it makes the first step of a
draft that hangs take twice as long."""
PROBE_STEPS = 16
"""Steps of which one takes half the rows that seem best, and no scaffold, so that what fewer rows take stays known:
they are passed over for a first step that was slow. Doubling it halves what that costs, and finds such a mistake half
as fast."""
LEAST_GAIN = 1.2
"""Times the tokens a second of a plain step that rows with drafts have to promise. What drafts cost beside their rows,
messages and memory that others read, was 5 to 10 % of a step of 8 to 64 answers on two cores, and at 1.1 eight answers
were 0.91 times as fast as plain. At 1.4, drafts that pay are passed over."""
_PATIENCE = 2.0
"""Times what guesses usually take that a step is held for them. Doubling it doubles what is waited in vain."""
RATE_WEIGHT = 0.25
"""Weight of a step in the rate of tokens. Doubling it follows the load twice as fast, and chance, too."""


class RowRule:
    """Of one target."""

    def __init__(self) -> None:
        self.cost = RowCost()
        self._num_chosen = 0
        self._pays = True
        """Whether the last candidates that might have been passed over were not."""
        self._rate = 0.0
        """Tokens that all slots together gain a second."""

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Record a step without prompts: what it was fed, and how many tokens it committed."""
        self.cost.note(num_rows, seconds)
        self._rate += RATE_WEIGHT * (num_tokens / seconds - self._rate)

    def choose(self, found: Sequence[Candidates], num_rows: int, most: int) -> list[int]:
        """Return how many candidates of each slot are verified. num_rows: of the step without any; most: in all."""
        plan = self.plan(found, num_rows, most)
        if plan.offers:
            self._pays = plan.pays
        self._num_chosen += 1
        return plan.counts(plan.count // 2 if self._is_probe(self._num_chosen) else plan.count)

    def plan(self, found: Sequence[Candidates], num_rows: int, most: int) -> StepPlan:
        """Return what would be chosen, if nothing were tried out."""
        named = [0] * len(found)
        base_gain = float(len(found))
        for index in sorted(range(len(found)), key=lambda i: found[i].most_must):  # who asks for least goes first
            must, most_must = found[index].must, found[index].most_must
            if most_must <= most:
                named[index] = must
                most -= most_must
                base_gain += sum(found[index].gains[:must])
        merged = heapq.merge(*([(-gain, i) for gain in each.gains] for i, each in enumerate(found) if not each.must))
        offers = [offer for offer, _ in zip(merged, range(most), strict=False)]
        gains, num_rows = [-gain for gain, _ in offers], num_rows + sum(named)
        count = best_count(gains, base_gain, num_rows, self.cost)
        pays = self._is_worth(base_gain + sum(gains[:count]), num_rows + count, base_gain, num_rows)
        plan = StepPlan(named, offers, count if pays else 0, pays)
        within = self._within_limits(plan, found, num_rows)
        return plan._replace(count=within, pays=pays and (within > 0 or not count))

    def _within_limits(self, plan: StepPlan, found: Sequence[Candidates], num_rows: int) -> int:
        """Return the most of the plan's offers with which every slot that says how long a token may take is expected to
        keep to it, but for those that no step would keep to. num_rows: of the step without any.
        """
        limits_ms = {i: each.lease.slot.scheduling.max_tpot_ms for i, each in enumerate(found)}
        limits_s = {i: limit_ms / 1e3 for i, limit_ms in limits_ms.items() if limit_ms is not None}
        plain_s = self._seconds(max(1, num_rows))
        longest_s = {i: limit_s * (1.0 + sum(found[i].gains[: plan.named[i]])) for i, limit_s in limits_s.items()}
        longest_s = {i: step_s for i, step_s in longest_s.items() if plain_s <= step_s}
        if not longest_s:
            return plan.count
        best, least_s = 0, min(longest_s.values())
        for count, (gain, index) in enumerate(plan.offers[: plan.count], start=1):
            if index in longest_s:
                before_s = longest_s[index]
                longest_s[index] -= gain * limits_s[index]  # which is negated
                least_s = min(longest_s.values()) if before_s == least_s else least_s
            if self._seconds(num_rows + count) <= least_s:
                best = count
        return best

    def scaffolds(self, found: Sequence[Candidates], num_rows: int, most: int) -> list[bool]:
        """Return whose scaffolds are fed: of slots that name how much is verified, and of those with which the most
        tokens a second are made, if together they make LEAST_GAIN times as many as without. Asked before `choose`, to
        which they are rows like others. num_rows: of the step without any; most: in all, their candidates among them.
        """
        fed = [False] * len(found)
        offers = list[tuple[float, int, int, float]]()
        for index, each in enumerate(found):
            if not each.extra_rows:
                continue
            gain = each.extra_gain
            rows = each.extra_cost_rows
            if not each.lease.speculation.is_fixed:
                offers.append((-gain / rows, index, rows, gain))
            elif rows <= most:
                fed[index], most = True, most - rows
        if self._is_probe(self._num_chosen + 1):
            return fed
        total, num_more, num_best = float(len(found)), 0, 0
        least = LEAST_GAIN * total / self._seconds(num_rows)
        for count, (_, _, rows, gain) in enumerate(sorted(offers), start=1):
            total, num_more = total + gain, num_more + rows
            if num_more > most or (count > 1 and num_rows + num_more > self.cost.reach):
                break
            if total / self._seconds(num_rows + num_more) >= least:
                num_best, least = count, total / self._seconds(num_rows + num_more)
        for _, index, _, _ in sorted(offers)[:num_best]:
            fed[index] = True
        return fed

    def _seconds(self, num_rows: int) -> float:
        """Return what a step takes; of all steps the same while nothing is known."""
        return self.cost.seconds(num_rows) or 1.0

    def _is_probe(self, number: int) -> bool:
        """Return whether the step of that number, from 1, is to show what fewer rows take."""
        return number % PROBE_STEPS == 0

    def _is_worth(self, gain: float, num_rows: int, plain_gain: float, num_plain_rows: int) -> bool:
        seconds, plain_s = self.cost.seconds(num_rows), self.cost.seconds(num_plain_rows)
        return seconds is None or plain_s is None or gain / seconds >= LEAST_GAIN * plain_gain / plain_s

    def hold_until(self, lacking: Sequence[Lacking], now: float, rate: float | None = None) -> float | None:
        """Return until when the step waits for the next guesses of these drafts; None to go at once, as ever while what
        comes does not pay. rate: tokens a second that a wait costs, where they pay; that of all unless given.
        """
        if rate is None:
            if not self._pays:
                return None
            rate = self._rate
        coming = list[_Coming]()
        for lease, draft, chance in lacking:
            expected = expected_arrival(lease, draft, now)
            if expected is not None:
                gain = chance + _more(draft, lease.max_drafts, chance, rate) if expected.is_first else chance
                coming.append(_Coming(expected.until_s, expected.takes_s, gain))
        if not coming or rate <= 0.0:
            return None
        first = min(coming)
        return first.until_s if sum(each.gain for each in coming) / rate > first.takes_s else None


class ExpectedArrival(NamedTuple):
    """When the next draft tokens of a draft are expected for a slot."""

    until_s: float
    """Monotonic time at which they are overdue."""
    takes_s: float
    """How long they usually take."""
    is_first: bool
    """None are buffered for the slot's next step."""


def expected_arrival(lease: Lease, draft: Delivered, now: float) -> ExpectedArrival | None:
    """Return when the next draft tokens should arrive; None where that is unknown, or they are overdue."""
    is_first = lease.length in draft.starved_since_s
    since_s, takes_s = (lease.ready_s, draft.eta_s) if is_first else (draft.arrived_s, draft.gap_s)
    if takes_s is None:
        return None
    until_s = since_s + _PATIENCE * takes_s
    return ExpectedArrival(until_s, takes_s, is_first) if now < until_s else None


def _more(draft: Delivered, room: int, chance: float, rate: float) -> float:
    """Return the tokens that guesses after the first would bring, less what waiting for each of them costs."""
    cost, more = (draft.gap_s or 0.0) * rate, 0.0
    for _ in range(0 if draft.gap_s is None else room - 1):
        chance *= draft.shares.share(0)
        if chance <= cost:
            break
        more += chance - cost
    return more


class StepPlan(NamedTuple):
    """Which draft tokens a step verifies."""

    named: Sequence[int]
    """Of each slot, those that its request names."""
    offers: Sequence[tuple[float, int]]
    """Negated chance, and the slot, of those of the others, best first."""
    count: int
    """How many of these are verified."""
    pays: bool
    """Whether those that make the most tokens a second are worth what drafts cost beside their rows."""

    def counts(self, count: int) -> list[int]:
        """Return how many candidates of each slot are verified, of so many offers."""
        counts = list(self.named)
        for _, index in self.offers[:count]:
            counts[index] += 1
        return counts


class Lacking(NamedTuple):
    """A draft of which more guesses are on their way."""

    lease: Lease
    draft: Delivered
    chance: float
    """That the next one would be kept."""


class _Coming(NamedTuple):
    """Guesses on their way."""

    until_s: float
    takes_s: float
    gain: float
    """Tokens that are expected of them."""


def waits_until(lease: Lease) -> float:
    """Return until when a slot whose request names how much is verified lets others go without it."""
    return lease.ready_s + MOST_HOLD_S
