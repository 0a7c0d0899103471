"""What a step's decision on a slot teaches about its drafters, and reports of them and of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.speculation.candidates import outcomes
from outrider.wire.requests.drafters import Drafter
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.proposal import Proposal
from target_service.leases.jobs import DraftOutcome, Timings
from target_service.leases.lease import DeliveredDrafts, Lease


@dataclass(slots=True)
class StepTimes:
    """Monotonic times, in seconds, at which a step's forward began and ended and its decision was made."""

    started_s: float
    num_slots: int
    num_tokens: int
    """Tokens that the forward was fed, those of prompts among them."""
    forwarded_s: float = 0.0
    decided_s: float = 0.0

    def timings(self, lease: Lease) -> Timings:
        """Return the durations of the step for one slot."""
        held_s = 0.0
        if lease.held_from_s is not None:
            held_s = max(0.0, self.started_s - lease.held_from_s)
        return Timings(
            wait_us=_us(held_s),
            queue_us=_us(max(0.0, self.started_s - lease.ready_s - held_s)),
            forward_us=_us(self.forwarded_s - self.started_s),
            accept_us=_us(self.decided_s - self.forwarded_s),
            batch_size=self.num_slots,
            num_batch_tokens=self.num_tokens,
        )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def learn(
    lease: Lease,
    proposal: Proposal,
    path: Sequence[int],
    num_tokens: int,
    foretold: Sequence[bool],
    metrics: WorkerMetrics,
) -> list[DraftOutcome]:
    """Learn how often draft tokens are accepted from a step that committed num_tokens, and go on under these in what is
    buffered.

    path: the accepted nodes. foretold: of the tokens that a prediction proposed, verified or not, whether it was right.
    Returns the outcome of each draft worker, and last of what the target itself drafted.
    """
    for is_right in foretold:
        lease.own_sources[Drafter.PREDICTION].shares.note(0 if is_right else None)
    determined, tree = lease.slot.params.determined, proposal.tree
    verified = proposal.drafted_by
    for source, rank in outcomes(tree, proposal.sources, path[:num_tokens], is_determined=determined):
        # A prediction is counted above, and every node of deliveries that match below.
        is_counted = source.drafter in (None, Drafter.PREDICTION)
        if not is_counted and not (determined and isinstance(source, DeliveredDrafts)):
            source.shares.note(rank)
    rows = proposal.rows_beside
    if rows is not None and all(source.drafter is not rows.drafter for source in verified):
        lease.own_sources[rows.drafter].shares.note(None)  # what it cost brought nothing to this step
    for own in lease.own_sources.values():
        if own not in verified:
            own.shares.forget()
    delivered, found = set[int](), list[DraftOutcome]()
    committed = lease.slot.committed
    committed_len = len(committed) - num_tokens
    for draft in lease.drafts:
        is_verified = draft in verified
        if not is_verified:
            draft.shares.forget()
        note = draft.shares.note if determined else None
        num_dropped, num_late = draft.buffer.advance(committed[committed_len:], committed_len, note)
        metrics.note_parked("pruned", num_dropped)
        metrics.note_parked("late", num_late)
        if note is not None and is_verified and len(path) > num_tokens:
            note(None)  # behind the end of the output nothing was accepted
        nodes = proposal.sources.get(draft, {}).keys() - delivered
        delivered |= nodes
        num_accepted = len(nodes.intersection(path))
        state = draft.hit, draft.is_refused, draft.buffer.num_wasted
        found.append(DraftOutcome(len(nodes), num_accepted, is_verified, *state))
    metrics.note_parked("verified", len(delivered))
    num_own = len(tree) - len(delivered)
    found.append(DraftOutcome(num_own, len(path) - len(delivered.intersection(path)), num_own > 0))
    return found


def drafter_of(proposal: Proposal) -> Drafter | None:
    """Return the name of those who drafted; None for nobody, and for the grammar."""
    names = [source.drafter for source in proposal.drafted_by if source.drafter is not None]
    if len(names) > 1:
        return names[-1].merged()  # the target's own is tested last
    return names[0] if names else None
