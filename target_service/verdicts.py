"""From what a step decided to the verdict that a slot's gateway is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.wire.kinds import Drafter
from target_service.jobs import DraftOutcome, Timings
from target_service.lease import DeliveredDrafts, Lease
from target_service.proposal import Proposal


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Monotonic times, in seconds, at which a step's forward began and ended and its decision was made; and its size."""

    started_s: float
    forwarded_s: float
    decided_s: float
    num_slots: int
    num_tokens: int
    """Tokens that the forward was fed, those of prompts among them."""

    def timings(self, lease: Lease) -> Timings:
        """Return the durations of the step for one slot."""
        held_s = 0.0
        if lease.held_from_s is not None:
            held_s = max(0.0, self.started_s - lease.held_from_s)
        return Timings(
            wait_s=held_s,
            queue_s=max(0.0, self.started_s - lease.ready_s - held_s),
            forward_s=self.forwarded_s - self.started_s,
            accept_s=self.decided_s - self.forwarded_s,
            batch_size=self.num_slots,
            num_batch_tokens=self.num_tokens,
        )


def outcomes(lease: Lease, proposal: Proposal, path: Sequence[int], num_wasted: Sequence[int]) -> list[DraftOutcome]:
    """Return the outcome of each draft worker, and last of what the target itself drafted. path: the accepted nodes; a
    node that several drafters proposed counts for the first of them. num_wasted: of each draft worker.
    """
    num_drafted, num_accepted = [0] * (len(lease.drafts) + 1), [0] * (len(lease.drafts) + 1)
    for node in range(len(proposal.tree)):
        source = proposal.source_of(node)
        index = lease.drafts.index(source) if isinstance(source, DeliveredDrafts) else -1
        num_drafted[index] += 1
        num_accepted[index] += node in path
    found = list[DraftOutcome]()
    for index, draft in enumerate(lease.drafts):
        is_verified = draft in proposal.drafted_by
        numbers = num_drafted[index], num_accepted[index]
        found.append(DraftOutcome(*numbers, is_verified, draft.hit, draft.refused is not None, num_wasted[index]))
    found.append(DraftOutcome(num_drafted[-1], num_accepted[-1], num_drafted[-1] > 0))
    return found


def drafter_of(proposal: Proposal) -> Drafter | None:
    """Return the name of those who drafted; None for nobody, and for the grammar."""
    names = [source.drafter for source in proposal.drafted_by if source.drafter is not None]
    own = next((name for name in names if name is not Drafter.MODEL), None)
    if len(names) < 2:
        return names[0] if names else None
    return next(union for union in Drafter if union.unites and union.own is own)
