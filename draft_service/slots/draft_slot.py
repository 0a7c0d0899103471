"""A slot of the draft worker and the draft tree that grows in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.engine.speculation.growth import Growth, RowsAhead
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.slots import BareSlot


@dataclass(eq=False, slots=True)
class Block:
    """Output of a drafter at the positions behind the last committed token, before any of their tokens is known."""

    logits: Tensor
    """[N, V] float32, of what follows that token, and of the next positions."""
    hidden: Tensor | None = None
    """[N, d], the hidden states of the logits, for a sequential head."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """States [1, r] of a sequential head after nodes and ROOT, whose indices stay as long as the block does."""


@dataclass(eq=False, slots=True)
class DraftSlot:
    """State of one choice in the draft worker: its cache slot, and the draft tokens that grow under it."""

    job: OpenJob
    slot: BareSlot
    shares: SlotShares
    tree: Growth = field(init=False)
    is_growing: bool = False
    """False until the first Advance, and after a stop string."""
    ticket: int = 0
    pushed_s: float = 0.0
    """Monotonic time at which nodes were last sent."""
    spent_s: float = 0.0
    """Seconds of the slot's steps since then."""
    num_urgent: int = 0
    """Number of messages that are sent at once: the target had no draft tokens."""
    block: Block | None = None
    """Logits of the next positions, of a drafter of blocks; None once more tokens are committed."""
    ahead: RowsAhead | None = None
    """Has further rows fed beside the nodes; None for a draft without a table."""


NodeRequest = tuple[DraftSlot, Sequence[int]]
"""A slot, and the nodes of its tree, or ROOT, whose distributions are requested."""
