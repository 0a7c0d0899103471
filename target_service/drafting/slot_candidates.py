"""The candidates of one slot: the draft tokens that its next step might verify. Made by `draft_chooser`, read by
`budget`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.speculation.candidates import BudgetItem, CandidateTree
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.wire.requests.drafters import Drafter
from target_service.drafting.budget import VerifyChoice, VerifyDemand
from target_service.leases.lease import Lease, SlotDrafter


@dataclass(frozen=True, slots=True)
class Candidates:
    """Draft tokens that a slot's next step might verify, of one or several drafters."""

    lease: Lease
    trees: Mapping[SlotDrafter, CandidateTree] = field(default_factory=dict)
    """Draft tree of each drafter, in the order in which draws are tested; empty for a beam search."""
    budget_items: Sequence[BudgetItem] = ()
    """Draft tokens among which the budget chooses, best first unless the request fixes their number. After the end of a
    sampled chain, items without a token follow, so that the choice does not depend on the chain's length."""
    drafter: Drafter | None = None
    """One of the target's own drafters, if its tokens are made only after the budget has chosen their number, since
    most would never be verified. None if all tokens are made already."""
    extra_rows: ExtraRows | None = None
    """Rows that a drafter of the slot adds to a step that verifies all candidates, to make draft tokens for later
    steps; None for none."""

    @property
    def num_expected(self) -> float:
        """Expected number of accepted draft tokens if all candidates were verified.

        A sampled chain counts with the maximum length that it could have had, so that no sampled token influences the
        number.
        """
        return sum(budget_item.prob for budget_item in self.budget_items)

    @property
    def demand(self) -> VerifyDemand:
        """The slot's needs, from which the budget chooses how many of the candidates a step verifies.

        They do not depend on which tokens were sampled. If they did, the choice would change the output's distribution.
        """
        lease = self.lease
        shape = lease.speculation.tree
        rows = self.extra_rows
        is_fixed = lease.speculation.is_fixed
        probs = [budget_item.prob for budget_item in self.budget_items]
        num_required = 0
        if is_fixed:
            num_required = len(self.budget_items)
        max_rows = num_required
        is_whole = shape is not None and not lease.slot.params.is_deterministic and lease.is_exact
        if shape is not None and is_whole and num_required:
            num_trees = 0
            for candidates in self.trees.values():
                num_trees += bool(candidates.tree.ids)
            max_rows = min(shape.max_nodes * num_trees, lease.speculation.max_draft_tokens)
            probs = lease.first.chain_probs(shape.depth)
        demand = VerifyDemand(
            probs,
            num_required,
            max_rows,
            is_whole=is_whole,
            is_fixed=is_fixed,
            num_pending=lease.num_pending,
            scheduling=lease.slot.scheduling,
            ready_s=lease.ready_s,
        )
        if rows is None:
            return demand
        cost_rows = len(rows.ids)
        if all(slot_drafter.drafter is rows.drafter for slot_drafter in self.trees):
            cost_rows += len(self.budget_items)  # draft tokens that came of earlier such rows
        gain = rows.gain(lease.own_drafters[rows.drafter].acceptance)
        return replace(demand, extra_rows=len(rows.ids), extra_gain=gain, extra_cost_rows=cost_rows)

    def num_after(self, choice: VerifyChoice) -> int:
        """Return the number of tokens that the slot's cache will hold after a step with the draft tokens and extra rows
        that the budget chose.
        """
        num_tokens = len(self.lease.slot.cached) + self.lease.num_pending
        for budget_item in self.budget_items[: choice.num_draft_tokens]:
            num_tokens += bool(budget_item.nodes or self.drafter)
        if choice.with_extra_rows and self.extra_rows is not None:
            num_tokens += len(self.extra_rows.ids)
        return num_tokens
