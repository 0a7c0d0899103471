"""The candidates of one slot: the draft tokens that its next step might verify. Made by `choice`, read by `budget`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.speculation.candidates import BudgetOffer, CandidateTree
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.wire.requests.drafters import Drafter
from target_service.drafting.budget import VerifyChoice, VerifyDemand
from target_service.leases.lease import Lease, SlotDrafter


@dataclass(frozen=True, slots=True)
class Candidates:
    """Draft tokens that a slot's next step might verify."""

    lease: Lease
    trees: Mapping[SlotDrafter, CandidateTree] = field(default_factory=dict)
    """Draft tokens of each drafter, in the order in which draws are tested; empty for a beam search."""
    offers: Sequence[BudgetOffer] = ()
    """Best first, where the request names no number of draft tokens. An offer may turn out to have no token."""
    drafter: Drafter | None = None
    """Drafter of the target's own that makes its tokens once the budget has chosen their number, since most are never
    verified; None where all are made."""
    rows_beside: ExtraRows | None = None
    """Rows that a drafter of the slot would have fed beside all candidates, for draft tokens of later steps."""

    @property
    def num_expected(self) -> float:
        """Expected number of accepted draft tokens, were all offers verified.

        A sampled chain counts with the length that it might have had, so that no sampled token influences the number.
        """
        return sum(offer.prob for offer in self.offers)

    @property
    def demand(self) -> VerifyDemand:
        """All that the budget reads of the candidates. No sampled token influences it."""
        lease = self.lease
        shape = lease.speculation.tree
        rows = self.rows_beside
        is_fixed = lease.speculation.is_fixed
        probs = [offer.prob for offer in self.offers]
        num_required = 0
        if is_fixed:
            num_required = len(self.offers)
        max_rows = num_required
        is_whole = shape is not None and not lease.slot.params.is_deterministic and lease.is_exact
        if shape is not None and is_whole and num_required:
            num_trees = 0
            for candidates in self.trees.values():
                num_trees += bool(candidates.tree.ids)
            max_rows = min(shape.most_nodes * num_trees, lease.speculation.max_draft_tokens)
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
        if all(source.drafter is rows.drafter for source in self.trees):
            cost_rows += len(self.offers)  # draft tokens that came of earlier such rows
        gain = rows.gain(lease.own_drafters[rows.drafter].shares)
        return replace(demand, extra_rows=len(rows.ids), extra_gain=gain, extra_cost_rows=cost_rows)

    def num_after(self, choice: VerifyChoice) -> int:
        """Return the number of tokens in the slot's cache after a step with this choice."""
        num_tokens = len(self.lease.slot.cached) + self.lease.num_pending
        for offer in self.offers[: choice.num_drafts]:
            num_tokens += bool(offer.nodes or self.drafter)
        if choice.with_extra_rows and self.rows_beside is not None:
            num_tokens += len(self.rows_beside.ids)
        return num_tokens
