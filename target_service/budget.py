"""Temporary: the budget's new calls over its old files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.wire.scheduling import Scheduling
from target_service.rows import Lacking as PendingDraft
from target_service.rows import RowRule, expected_arrival, waits_until
from target_service.step_budget import StepBudget as OldBudget

__all__ = ["PendingDraft", "StepBudget", "VerifyChoice", "VerifyDemand", "expected_arrival", "waits_until"]


class VerifyDemand(NamedTuple):
    lease: object
    gains: Sequence[float]
    must: int
    most_must: int
    is_whole: bool
    num_pending: int
    extra_rows: int = 0
    extra_gain: float = 0.0
    extra_cost_rows: int = 0


class VerifyChoice(NamedTuple):
    num_drafts: int
    with_extra_rows: bool


class StepBudget:
    def __init__(self) -> None:
        self.rule = RowRule()
        self.budget = OldBudget(self.rule)

    def choose(self, demands, max_rows: int, num_free: int, absent: Iterable[Scheduling]):
        tails = [d.num_pending for d in demands]
        fed = self.rule.scaffolds(demands, sum(tails), min(max_rows, num_free))
        rows = [tail + d.extra_rows * f for tail, d, f in zip(tails, demands, fed)]
        counts = self.budget.choose(demands, rows, max_rows - (sum(rows) - sum(tails)), absent)
        return [None if c is None else VerifyChoice(c, f) for c, f in zip(counts, fed)]

    def note(self, num_rows, num_committed, seconds, gap_s) -> None:
        self.rule.note(num_rows, num_committed, seconds)
        self.budget.note(seconds, gap_s)

    def awaited(self, pending):
        return self.budget.waited_for(pending)

    def hold_until(self, awaited, now):
        return self.budget.hold_until(awaited, now)
