"""A slot of the draft worker and the draft tree that grows in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.engine.speculation.growth import Growth, RowsAhead
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.open_slots import BareSlot


@dataclass(eq=False, slots=True)
class Block:
    """Output of a `BlockDrafter`'s forward for one slot: distributions of the tokens after the last committed one."""

    logits: Tensor
    """Logits [N, V] float32: row 0 is for the token after the last committed one, the others for the N - 1 positions
    after it."""
    hidden: Tensor | None = None
    """Hidden states [N, d], one for each row of `logits`, which the head of a `SequentialDrafter` reads; None for other
    drafters."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """For a `SequentialDrafter`: recurrent state of its head after ROOT and after each node, by node index: r numbers,
    [1, r]."""


@dataclass(eq=False, slots=True)
class DraftSlot:
    """State of one choice in the draft worker: its committed tokens with their cache, and the draft tokens that grow
    after them.
    """

    job: OpenJob
    """Job that opened the slot."""
    slot: BareSlot
    """Slot with the committed tokens, and with their cache if the drafter has one."""
    acceptance: SlotAcceptance
    """Acceptance probabilities of draft tokens, by their rank among siblings. That of rank 0 is learned from this slot
    alone. The other ranks divide the remaining probability in proportions learned from all slots with the same
    acceptance rule."""
    tree: Growth = field(init=False)
    """Draft tree below the last committed token."""
    is_growing: bool = False
    """Whether draft tokens grow in the slot. It is False before the first Advance, and after the gateway has found a
    stop string in the output."""
    ticket: int = 0
    """Ticket of the lease under which the slot's draft tokens are sent to the target."""
    sent_s: float = 0.0
    """Monotonic time, in seconds, at which nodes of this slot were last sent to its target."""
    spent_s: float = 0.0
    """Duration in seconds of the steps that have fed this slot since its last delivery."""
    num_urgent: int = 0
    """Number of the slot's next messages that are to be sent at once, because the slot's target ran out of draft
    tokens."""
    block: Block | None = None
    """Latest block of a block drafter. None before it is filled; committing tokens sets it to None again."""
    ahead: RowsAhead | None = None
    """Look-ahead rows of the slot. None if the draft worker uses none."""


NodeRequest = tuple[DraftSlot, Sequence[int]]
"""A slot, and those nodes of its tree, or ROOT, after which distributions are requested."""
