"""The state of one lease: a slot that steps by itself, its drafters, and when their draft tokens arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.worker.scheduler import DORMANT_S
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import Speculation
from target_service.leases.draft_buffer import DraftBuffer
from target_service.leases.lease_jobs import VerifyJob
from target_service.leases.slot_search import Beams

MAX_STARVED = 8
"""Maximum number of entries in `SlotDraftWorker.starved_since_s`. An entry outlives its step, since it also times a
delivery that arrives after the step."""
ETA_WEIGHT = 0.25
"""Weight of a new measurement in the moving means `eta_s` and `gap_s` of `SlotDraftWorker`."""


@dataclass(eq=False, slots=True)
class SlotDrafter:
    """One drafter of one slot, and the probabilities with which its draft tokens are accepted in this slot."""

    drafter: Drafter | None
    """Which drafter: one of the target's own, MODEL for a draft worker, or None for the request's grammar."""
    acceptance: SlotAcceptance
    """Acceptance probabilities of the drafter's tokens, by their rank among siblings."""

    def chain_probs(self, max_len: int) -> list[float]:
        """Return a list of max_len numbers: entry i is the probability that the first i + 1 draft tokens of a chain are
        all accepted.
        """
        return [self.acceptance.chain_prob(depth) for depth in range(1, max_len + 1)]


@dataclass(eq=False, slots=True)
class SlotDraftWorker(SlotDrafter):
    """Draft worker as a drafter of one slot: its ticket, its draft buffer, and the times of its deliveries."""

    ticket: int
    is_active: bool
    """Whether a step may wait for this draft worker. It is False after a step has waited in vain, until the next
    delivery."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)
    has_drafts: bool | None = None
    """Whether draft tokens of this draft worker were buffered when the slot became ready for its present step; None
    before the draft worker's first delivery."""
    starved_since_s: dict[int, float] = field(default_factory=dict)
    """Times at which the slot became ready without draft tokens: committed length to monotonic time in seconds. An
    entry is removed when draft tokens for that length arrive."""
    starved_len: int = 0
    """Last committed length at which the slot was starved until draft tokens of this draft worker arrived."""
    eta_s: float | None = None
    """Moving mean of the seconds that a starved slot waits, from the time it is ready until its first draft tokens
    arrive; None before the first measurement."""
    gap_s: float | None = None
    """Moving mean of the seconds between two deliveries to a starved slot at the same committed length; None before the
    first measurement."""
    arrived_s: float = 0.0
    """Monotonic time of the last delivery, in seconds."""
    is_refused: bool = False
    """Whether a delivery of this draft worker has broken a rule of the protocol since the slot's last verdict."""
    is_skipped: bool = False
    """Whether the slot's next step verifies no draft tokens of this draft worker, even if they arrive before the
    step."""
    needs_features: bool = False
    """Whether the draft worker has subscribed to features of the slot's committed tokens."""

    def arrived(self, root_len: int, arrived_s: float) -> None:
        """Record that a delivery has arrived, late or not.

        root_len: number of committed tokens that the delivered draft tokens follow. arrived_s: monotonic time of the
        delivery, in seconds.
        """
        self.is_active = True
        self.has_drafts = bool(self.has_drafts)
        starved_s = self.starved_since_s.pop(root_len, None)
        if starved_s is not None:
            self.eta_s = _mean(self.eta_s, max(0.0, arrived_s - starved_s))
            self.starved_len = root_len
        elif root_len == self.starved_len:
            self.gap_s = _mean(self.gap_s, max(0.0, arrived_s - self.arrived_s))
        self.arrived_s = arrived_s

    def begin_step(self, committed_len: int, has_drafts: bool, now: float) -> None:
        """Record that the slot is ready for its next step.

        committed_len: number of the slot's committed tokens. has_drafts: whether draft tokens of this draft worker are
        buffered for the step. now: monotonic time, in seconds.
        """
        self.is_refused = self.is_skipped = False
        self.buffer.num_wasted = 0
        if self.has_drafts is not None:
            self.has_drafts = has_drafts
        if not has_drafts:
            self.starved_since_s[committed_len] = now
            if len(self.starved_since_s) > MAX_STARVED:
                del self.starved_since_s[next(iter(self.starved_since_s))]


@dataclass(eq=False, slots=True)
class Lease:
    """Lease of one slot. Until the slot has `job.lease_end_len` committed tokens, its steps need no message from the
    gateway.
    """

    job: VerifyJob
    slot: Slot
    speculation: Speculation
    drafts: Sequence[SlotDraftWorker]
    """One for each ticket of the lease, in the order in which their draws are tested. There is at least one, even if no
    draft worker drafts for the slot."""
    own_drafters: Mapping[Drafter, SlotDrafter]
    """The target's own drafters for this slot, each with its acceptance probabilities."""
    ready_s: float
    """Monotonic time, in seconds, at which the slot became ready for its next step: when Verify or Extend arrived, or
    at its last verdict."""
    beams: Beams | None = None
    """Beam search of the slot; None = the slot has none. Only the first draft worker delivers for a beam search."""
    held_from_s: float | None = None
    """Monotonic time, in seconds, since which the slot's next step is held for draft tokens; None if it is not held."""
    is_passed_over: bool = False
    """Whether the slot's present step began without draft tokens that were expected soon, because waiting for them did
    not pay."""

    @property
    def first(self) -> SlotDraftWorker:
        """Draft worker whose ticket names the lease: the first of `drafts`."""
        return self.drafts[0]

    def draft_of_ticket(self, ticket: int) -> SlotDraftWorker:
        """Return the lease's draft worker with this ticket. The ticket must be one of the lease's."""
        return next(draft for draft in self.drafts if draft.ticket == ticket)

    @property
    def length(self) -> int:
        """Number of the slot's committed tokens. In a beam search: number of tokens of each live beam, including the
        prompt.
        """
        if self.beams is not None:
            return self.beams.tree.length
        return len(self.slot.committed)

    @property
    def is_drafted(self) -> bool:
        """Whether at least one draft worker drafts for the slot."""
        return any(is_drafted for _, is_drafted in self.job.tickets)

    @property
    def is_exact(self) -> bool:
        """Whether acceptance is exact, i.e. without lenience. With lenience, only chains are verified, token by
        token.
        """
        return self.slot.params.lenience == 1.0

    @property
    def max_depth(self) -> int:
        """Maximum depth of the draft tokens of the next step, where children of the root have depth 1. It leaves room
        for the token that a step commits after the accepted ones.
        """
        if self.beams is not None:
            return self.beams.drafts.max_depth
        if self.speculation.is_plain:
            return 0
        return max(0, min(self.speculation.max_draft_tokens, self.slot.max_len - len(self.slot.committed) - 1))

    @property
    def max_chain(self) -> int:
        """Maximum length of a chain of draft tokens in the slot's next step."""
        return self.speculation.chain_len(self.max_depth)

    @property
    def num_required(self) -> int:
        """Number of draft tokens per step that the request fixes, or fewer if the output's maximum length leaves no
        room for them. Use it only if the request fixes a number or a tree shape.
        """
        tree = self.speculation.tree
        if tree is None:
            return self.max_chain
        return min(tree.max_nodes, self.max_depth)

    def likely_chain(self, slot_drafter: SlotDrafter) -> int:
        """Return the maximum length of a drafter's chain in the slot's next step. If the request fixes the number of
        draft tokens, that is the lease's `max_chain`. If not, the chain ends before the first token whose estimated
        acceptance probability is too small to be worth a row.
        """
        if self.speculation.is_fixed:
            return self.max_chain
        return slot_drafter.acceptance.likely_len(self.max_chain)

    @property
    def num_pending(self) -> int:
        """Number of rows that the slot has in its next step, without draft tokens and extra rows."""
        if self.beams is not None:
            return self.beams.num_fed(self.slot)
        return len(self.slot.committed) - len(self.slot.cached)

    @property
    def is_running(self) -> bool:
        """Whether the slot may take another step under this lease."""
        return self.length < self.job.lease_end_len

    @property
    def is_ended(self) -> bool:
        """Whether no more draft tokens are expected from the draft workers for the slot's next step. The lease itself
        may go on.
        """
        if self.beams is not None:
            return self.beams.drafts.is_ended
        return all(draft.buffer.is_ended for draft in self.drafts)

    def is_soon_ready(self, now: float) -> bool:
        """Return whether the slot is likely to be ready soon. If so, the rows of other callers in the next step are
        limited, so that it ends in time for the slot's caller to get its share of the target's time.

        It is likely if the slot was ready within the last DORMANT_S seconds, or if its prompt is being prefilled over
        several steps. now: monotonic time, in seconds.
        """
        slot = self.slot
        return now - slot.last_request_s < DORMANT_S or bool(
            self.is_running and slot.num_blocks and needs_prefill(slot)
        )

    def begin_step(self, now: float) -> None:
        """Record that the slot is ready for its next step. now: monotonic time, in seconds."""
        self.ready_s = now
        self.held_from_s = None
        self.is_passed_over = False
        for draft in self.drafts:
            if self.beams is None:
                has_drafts = bool(draft.buffer.chain(1))
            else:
                has_drafts = self.beams.drafts.depth > 0
            draft.begin_step(self.length, has_drafts, now)


def _mean(previous: float | None, new: float) -> float:
    if previous is None:
        return new
    return previous + ETA_WEIGHT * (new - previous)
