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
    """Output of a block drafter at the positions after the last committed token, whose tokens are not known yet."""

    logits: Tensor
    """[N, V] float32, logits of the token after the last committed one, and of the next N - 1 positions."""
    hidden: Tensor | None = None
    """[N, d], hidden states of the logits, for a sequential head; else None."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """States [1, r] of a sequential head after nodes and ROOT, whose indices are stable while the block exists."""


@dataclass(eq=False, slots=True)
class DraftSlot:
    """State of one choice in the draft worker: its cache slot, and the draft tokens that grow under it."""

    job: OpenJob
    """Job that opened the slot."""
    slot: BareSlot
    """Cache slot, with the committed tokens."""
    shares: SlotAcceptance
    """How often draft tokens of a rank were accepted, for this slot and slots like it."""
    tree: Growth = field(init=False)
    """Draft tree under the last committed token."""
    is_growing: bool = False
    """Whether draft tokens grow in the slot: not before the first Advance, nor after a stop string."""
    ticket: int = 0
    """Ticket of the lease that the draft tokens are for."""
    sent_s: float = 0.0
    """Monotonic time at which nodes were last sent."""
    spent_s: float = 0.0
    """Time of the slot's steps since `pushed_s`, in seconds."""
    num_urgent: int = 0
    """Number of further messages that are sent at once, because the target had no draft tokens."""
    block: Block | None = None
    """Logits of the next positions, from a block drafter; None once more tokens are committed."""
    ahead: RowsAhead | None = None
    """Look-ahead rows that are fed beside the nodes; None for a draft without a table."""


NodeRequest = tuple[DraftSlot, Sequence[int]]
"""A slot with the nodes of its tree, or ROOT, whose distributions are requested."""
