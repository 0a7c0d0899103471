"""What the target knows of a slot that steps by itself, and of the draft tokens that are delivered for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.scheduler import DORMANT_S
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import Speculation
from target_service.leases.beams import Beams
from target_service.leases.draft_buffer import DraftBuffer
from target_service.leases.jobs import VerifyJob

MAX_STARVED = 8
"""Committed lengths of a draft at which starving slots are remembered, so that later deliveries tell what they took."""
ETA_WEIGHT = 0.25
"""Weight of a new arrival in the mean time that a slot's draft tokens take."""


@dataclass(eq=False, slots=True)
class DraftSource:
    """Who drafts for a slot."""

    drafter: Drafter | None
    """A drafter of the target's own, or MODEL for what a draft worker delivers; None: the request's grammar."""
    shares: SlotShares
    """How often its draft tokens are accepted."""

    def chain_probs(self, max_len: int) -> list[float]:
        """Return the acceptance probability of each draft token of a chain of max_len."""
        return [self.shares.chain_prob(depth) for depth in range(1, max_len + 1)]


@dataclass(eq=False, slots=True)
class DeliveredDrafts(DraftSource):
    """What one draft worker delivers for a slot, under a ticket of its own, and how long it takes."""

    ticket: int
    is_active: bool
    """False after a hold timed out with no delivery; the next delivery sets it again."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)
    hit: bool | None = None
    """Draft tokens were buffered when the slot became ready for this step; None before the first delivery."""
    starved_since_s: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which the slot became ready without draft tokens, by committed length, until some arrive."""
    starved_len: int = 0
    """Committed length for which the last draft tokens came that a starved slot waited for."""
    eta_s: float | None = None
    """Mean seconds from such a moment to the first draft tokens."""
    gap_s: float | None = None
    """Mean seconds from some draft tokens to the next ones of the same length, while the slot is starved."""
    arrived_s: float = 0.0
    """Monotonic time of the last delivery."""
    is_refused: bool = False
    """A delivery broke a rule since the last verdict."""
    is_skipped: bool = False
    """The slot's next step excludes this draft, whatever of it arrives before."""
    reads_features: bool = False
    """It has subscribed to features of the slot's committed tokens."""

    def arrived(self, root_len: int, arrived_s: float) -> None:
        """Record the arrival of draft tokens that follow `root_len` committed ones, of use or not."""
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
        """Record that the slot is ready for its step at `committed_len`. has_drafts: some are buffered for it."""
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
    """A slot that steps by itself until it has as many committed tokens as its job says."""

    job: VerifyJob
    slot: Slot
    speculation: Speculation
    drafts: Sequence[DeliveredDrafts]
    """Of each draft worker that may deliver, in the order in which draws are tested; at least one."""
    own_sources: Mapping[Drafter, DraftSource]
    """The target's own drafters for the slot."""
    ready_s: float
    """Monotonic time at which the slot became ready: its Verify or Extend came, or its last verdict left."""
    beams: Beams | None = None
    """The search that goes on in place of sampled tokens. The first draft alone delivers for it."""
    held_from_s: float | None = None
    """Monotonic time at which the next step was first held for draft tokens."""
    is_passed_over: bool = False
    """Draft tokens were expected for the next step, which began without them because to wait does not pay."""

    @property
    def first(self) -> DeliveredDrafts:
        return self.drafts[0]

    def of_ticket(self, ticket: int) -> DeliveredDrafts:
        """Return what is delivered under one of the lease's tickets."""
        return next(draft for draft in self.drafts if draft.ticket == ticket)

    @property
    def length(self) -> int:
        """Number of committed tokens, or of tokens of each live beam."""
        return len(self.slot.committed) if self.beams is None else self.beams.tree.length

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a step that may follow each other: it commits one more than it accepts."""
        if self.beams is not None:
            return self.beams.drafts.max_depth
        if self.speculation.is_plain:
            return 0
        return max(0, min(self.speculation.max_draft_tokens, self.slot.max_len - len(self.slot.committed) - 1))

    @property
    def num_pending(self) -> int:
        """Number of tokens that its next step feeds without drafts."""
        if self.beams is not None:
            return self.beams.num_fed(self.slot)
        return len(self.slot.committed) - len(self.slot.cached)

    @property
    def is_running(self) -> bool:
        """Whether it may take another step."""
        return self.length < self.job.until_len

    @property
    def is_ended(self) -> bool:
        """Whether no more draft tokens will come for the next step."""
        if self.beams is not None:
            return self.beams.drafts.is_ended
        return all(draft.buffer.is_ended for draft in self.drafts)

    def is_soon_ready(self, now: float) -> bool:
        """Return whether steps leave room for the slot's caller: it was asked for lately, or its prompt is being fed,
        which takes many steps, and as many longer ones where nobody bounds them.
        """
        slot = self.slot
        return now - slot.asked_s < DORMANT_S or bool(self.is_running and slot.num_blocks and needs_prefill(slot))

    def begin_step(self, now: float) -> None:
        """Record that the slot is ready for its next step."""
        self.ready_s = now
        self.held_from_s = None
        self.is_passed_over = False
        for draft in self.drafts:
            has_drafts = bool(draft.buffer.chain(1) if self.beams is None else self.beams.drafts.depth)
            draft.begin_step(self.length, has_drafts, now)


def _mean(previous: float | None, new: float) -> float:
    return new if previous is None else previous + ETA_WEIGHT * (new - previous)
