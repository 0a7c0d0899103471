"""What one slot's step verifies: a draft tree, and the draws that rejection tests, in the order of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.worker.slots import Slot


@dataclass(frozen=True, slots=True)
class Draw:
    """A draft token that was sampled, and is accepted or rejected by its distribution."""

    parent: int
    """The node that it follows, or ROOT."""
    node: int
    """Its node. Two drafters may have drawn the same: that is one node and two draws."""
    distribution: RowLaw | None
    """What it was drawn from; None: what is left of that of the draw before it, which is a sibling's."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of one slot that a step verifies, ready for the forward."""

    slot: Slot
    tree: DraftTree
    """Empty for a plain step."""
    draws: Sequence[Draw] = ()
    """In the order in which they are tested: those of one parent by drafter, and each drafter's in the order in which
    it drew. None where `is_matched`."""
    is_matched: bool = True
    """Draft tokens are accepted as far as they equal the target's own: under `greedy` and `coupled`, and for
    deterministic draft tokens under `rejection`. A node that is no draw is deterministic."""
