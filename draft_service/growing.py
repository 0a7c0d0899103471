"""A slot of the draft, and the tree that grows there."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.block import Block
from draft_service.cascade import Cascade
from outrider.engine.speculation.growing_beams import GrowingBeams
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.slots import BareSlot


@dataclass(eq=False, slots=True)
class Growing:
    """What a draft knows of an answer."""

    job: OpenJob
    slot: BareSlot
    shares: SlotShares
    ticket: int = 0
    tree: GrowingTree | GrowingBeams | None = None
    """None until it is told what is committed, and after a stop."""
    pushed_s: float = 0.0
    spent_s: float = 0.0
    """What steps took that grew it since nodes of it were last sent."""
    num_urgent: int = 0
    """Messages that leave at once: the target had nothing to go on with."""
    block: Block | None = None
    """What a drafter of blocks knows of the next positions."""
    cascade: Cascade | None = None
    """A table's guesses of what is drawn; None where nothing guesses that."""
