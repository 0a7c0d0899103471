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
"""Maximum number of committed lengths of one draft at which a starved slot is remembered, to time late deliveries."""
ETA_WEIGHT = 0.25
"""Weight of a new arrival in the moving mean of the seconds that draft tokens take."""


@dataclass(eq=False, slots=True)
class SlotDrafter:
    """One drafter of one slot."""

    drafter: Drafter | None
    """A drafter of the target's own, MODEL for a draft worker, or None for the request's grammar."""
    shares: SlotAcceptance
    """Acceptance probabilities of its draft tokens, by rank."""

    def chain_probs(self, max_len: int) -> list[float]:
        """Return the acceptance probability of each draft token of a chain of max_len."""
        return [self.shares.chain_prob(depth) for depth in range(1, max_len + 1)]


@dataclass(eq=False, slots=True)
class DeliveredDrafts(SlotDrafter):
    """A draft worker as the drafter of one slot: its ticket, its draft buffer, and the times of its deliveries."""

    ticket: int
    is_active: bool
    """Whether a step may wait for it: false after a wait without a delivery, until the next delivery."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)
    hit: bool | None = None
    """Whether draft tokens were buffered when the slot became ready for this step; None before the first delivery."""
    starved_since_s: dict[int, float] = field(default_factory=dict)
    """By committed length, the monotonic time in seconds at which the slot became ready without draft tokens. An entry
    goes when some arrive."""
    starved_len: int = 0
    """Committed length of the last delivery for which the slot was starved."""
    eta_s: float | None = None
    """Mean seconds from a starved slot's readiness to its first draft tokens; None before the first measurement."""
    gap_s: float | None = None
    """Mean seconds between deliveries for one committed length of a starved slot; None before the first measurement."""
    arrived_s: float = 0.0
    """Monotonic time of the last delivery, in seconds."""
    is_refused: bool = False
    """Whether a delivery broke a rule since the last verdict."""
    is_skipped: bool = False
    """Whether the slot's next step excludes this draft, whatever of it arrives before."""
    reads_features: bool = False
    """Whether it has subscribed to features of the slot's committed tokens."""

    def arrived(self, root_len: int, arrived_s: float) -> None:
        """Record the delivery, late or not, of draft tokens that follow `root_len` committed tokens.

        arrived_s: monotonic time of the delivery, in seconds.
        """
        self.is_active = True
        self.hit = bool(self.hit)
        starved_s = self.starved_since_s.pop(root_len, None)
        if starved_s is not None:
            self.eta_s = _mean(self.eta_s, max(0.0, arrived_s - starved_s))
            self.starved_len = root_len
        elif root_len == self.starved_len:
            self.gap_s = _mean(self.gap_s, max(0.0, arrived_s - self.arrived_s))
        self.arrived_s = arrived_s

    def begin_step(self, committed_len: int, has_drafts: bool, now: float) -> None:
        """Record that the slot is ready for its step at `committed_len`.

        has_drafts: whether draft tokens are buffered for it. now: monotonic time, in seconds.
        """
        self.is_refused = self.is_skipped = False
        self.buffer.num_wasted = 0
        if self.hit is not None:
            self.hit = has_drafts
        if not has_drafts:
            self.starved_since_s[committed_len] = now
            if len(self.starved_since_s) > MAX_STARVED:
                del self.starved_since_s[next(iter(self.starved_since_s))]


@dataclass(eq=False, slots=True)
class Lease:
    """A slot that steps by itself until it has `job.until_len` committed tokens."""

    job: VerifyJob
    slot: Slot
    speculation: Speculation
    drafts: Sequence[DeliveredDrafts]
    """The draft workers that may deliver, in the order in which draws are tested; at least one."""
    own_drafters: Mapping[Drafter, SlotDrafter]
    """The target's own drafters for the slot."""
    ready_s: float
    """Monotonic time, in seconds, at which the slot became ready: of its Verify or Extend, or of its last verdict."""
    beams: Beams | None = None
    """The beam search that runs in place of sampling. Only the first draft delivers for it."""
    held_from_s: float | None = None
    """Monotonic time, in seconds, from which the next step is held for draft tokens; None where it is not."""
    is_passed_over: bool = False
    """Whether the next step began without draft tokens that were expected, because to wait for them does not pay."""

    @property
    def first(self) -> DeliveredDrafts:
        """The draft whose ticket names the lease."""
        return self.drafts[0]

    def of_ticket(self, ticket: int) -> DeliveredDrafts:
        """Return the draft that delivers under one of the lease's tickets."""
        return next(draft for draft in self.drafts if draft.ticket == ticket)

    @property
    def length(self) -> int:
        """Number of committed tokens, or of tokens of each live beam."""
        if self.beams is not None:
            return self.beams.tree.length
        return len(self.slot.committed)

    @property
    def is_drafted(self) -> bool:
        """Whether a draft worker drafts for the slot."""
        return any(is_drafted for _, is_drafted in self.job.tickets)

    @property
    def is_exact(self) -> bool:
        """Whether acceptance is exact: with lenience, draft tokens are chains that are tested one by one."""
        return self.slot.params.lenience == 1.0

    @property
    def max_drafts(self) -> int:
        """Maximum depth of draft tokens in the next step, which commits one token more than it accepts."""
        if self.beams is not None:
            return self.beams.drafts.max_depth
        if self.speculation.is_plain:
            return 0
        return max(0, min(self.speculation.max_draft_tokens, self.slot.max_len - len(self.slot.committed) - 1))

    @property
    def max_chain(self) -> int:
        """Maximum length of a chain of draft tokens in the next step."""
        return self.speculation.chain_len(self.max_drafts)

    @property
    def num_named(self) -> int:
        """Number of draft tokens that the request names for each step, as far as the slot has room for them."""
        tree = self.speculation.tree
        if tree is None:
            return self.max_chain
        return min(tree.most_nodes, self.max_drafts)

    def likely_chain(self, source: SlotDrafter) -> int:
        """Return the maximum length of a drafter's chain in the next step: only likely tokens, unless K is named."""
        if self.speculation.is_fixed:
            return self.max_chain
        return source.shares.likely_len(self.max_chain)

    @property
    def num_pending(self) -> int:
        """Number of rows of the slot in its next step without draft tokens."""
        if self.beams is not None:
            return self.beams.num_fed(self.slot)
        return len(self.slot.committed) - len(self.slot.cached)

    @property
    def is_running(self) -> bool:
        """Whether the slot may take another step."""
        return self.length < self.job.until_len

    @property
    def is_ended(self) -> bool:
        """Whether no more draft tokens will be delivered for the next step."""
        if self.beams is not None:
            return self.beams.drafts.is_ended
        return all(draft.buffer.is_ended for draft in self.drafts)

    def is_soon_ready(self, now: float) -> bool:
        """Return whether steps leave room for the slot's caller though the slot is not ready.

        It was ready within DORMANT_S, or its prompt is being prefilled, which takes many steps.
        """
        slot = self.slot
        return now - slot.asked_s < DORMANT_S or bool(self.is_running and slot.num_blocks and needs_prefill(slot))

    def begin_step(self, now: float) -> None:
        """Record that the slot is ready for its next step."""
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
