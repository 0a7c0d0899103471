"""The measurements in a verdict: times of the step, and outcomes of drafters, which update acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.speculation.candidates import outcomes
from outrider.wire.requests.drafters import Drafter
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.proposal import Proposal
from target_service.leases.lease import Lease, SlotDraftWorker
from target_service.leases.lease_jobs import DraftOutcome, Timings


@dataclass(slots=True)
class StepClock:
    """Times at which one step began and its phases ended, and the size of the step."""

    started_s: float
    """Monotonic time at which the forward began, in seconds."""
    num_slots: int
    num_tokens: int
    """Number of tokens in the forward, those of prompts included."""
    forwarded_s: float = 0.0
    """Monotonic time at which the forward ended, in seconds."""
    decided_s: float = 0.0
    """Monotonic time at which the decisions were made, in seconds."""

    def timings(self, lease: Lease) -> Timings:
        """Return the durations of the step for one slot: how long the ready slot waited for draft tokens, how long for
        other reasons, and how long the forward and the decisions of all slots took.
        """
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
    predicted: Sequence[bool],
    metrics: WorkerMetrics,
) -> list[DraftOutcome]:
    """Update the acceptance probabilities of the slot's drafters after a step, and advance the slot's draft buffers
    past the tokens that the step committed.

    path: the accepted nodes. num_tokens: number of committed tokens. predicted: result of `OwnDrafts.append`: for each
    committed token for which the request's prediction had proposed a draft token, whether that equals it. Returns the
    outcome of each draft worker and, last, that of the target's own drafter.
    """
    for is_right in predicted:
        lease.own_drafters[Drafter.PREDICTION].acceptance.note(0 if is_right else None)
    verified = proposal.drafted_by
    _note_tested(lease, proposal, path[:num_tokens])
    rows = proposal.extra_rows
    if rows is not None and not any(slot_drafter.drafter is rows.drafter for slot_drafter in verified):
        lease.own_drafters[rows.drafter].acceptance.note(None)  # its rows cost time, and brought nothing to this step
    for own in lease.own_drafters.values():
        if own not in verified:
            own.acceptance.forget()
    delivered = set[int]()
    found = list[DraftOutcome]()
    for draft in lease.drafts:
        is_verified = draft in verified
        if not is_verified:
            draft.acceptance.forget()
        _advance_buffer(lease, draft, num_tokens, metrics)
        if lease.slot.params.is_deterministic and is_verified and len(path) > num_tokens:
            draft.acceptance.note(None)  # behind the end of the output nothing was accepted
        nodes = proposal.slot_drafters.get(draft, {}).keys() - delivered
        delivered |= nodes
        outcome = DraftOutcome(
            num_drafted=len(nodes),
            num_accepted=len(nodes.intersection(path)),
            is_verified=is_verified,
            has_drafts=draft.has_drafts,
            is_refused=draft.is_refused,
            num_wasted=draft.buffer.num_wasted,
        )
        found.append(outcome)
    metrics.count_delivered("verified", len(delivered))
    num_own = len(proposal.tree) - len(delivered)
    num_own_accepted = len(path) - len(delivered.intersection(path))
    found.append(DraftOutcome(num_own, num_own_accepted, is_verified=num_own > 0))
    return found


def _note_tested(lease: Lease, proposal: Proposal, path: Sequence[int]) -> None:
    determined = lease.slot.params.is_deterministic
    for slot_drafter, rank in outcomes(proposal.tree, proposal.slot_drafters, path, is_determined=determined):
        if slot_drafter.drafter in (None, Drafter.PREDICTION):
            continue  # a prediction is noted by its own count of hits
        if determined and isinstance(slot_drafter, SlotDraftWorker):
            continue  # every node of a matched delivery is noted when its buffer advances
        slot_drafter.acceptance.note(rank)


def _advance_buffer(lease: Lease, draft: SlotDraftWorker, num_tokens: int, metrics: WorkerMetrics) -> None:
    note = None
    if lease.slot.params.is_deterministic:
        note = draft.acceptance.note
    committed = lease.slot.committed
    committed_len = len(committed) - num_tokens
    num_dropped, num_late = draft.buffer.advance(committed[committed_len:], committed_len, note)
    metrics.count_delivered("pruned", num_dropped)
    metrics.count_delivered("late", num_late)


def drafter_of(proposal: Proposal) -> Drafter | None:
    """Return the drafter to be named in the verdict about a proposal. If several drafters proposed the tokens, it is
    the merged drafter's name. None if there are no draft tokens, or only tokens that the grammar forced.
    """
    drafters = list[Drafter]()
    for slot_drafter in proposal.drafted_by:
        if slot_drafter.drafter is not None:
            drafters.append(slot_drafter.drafter)
    if not drafters:
        return None
    if len(drafters) > 1:
        return drafters[-1].merged()  # the target's own is tested last
    return drafters[0]
