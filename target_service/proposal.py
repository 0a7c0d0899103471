"""What one slot's step verifies: a draft tree, and the draws that rejection tests, in the order of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.worker.slots import Slot
from target_service.jobs import Fallback
from target_service.lease import DraftSource


@dataclass(frozen=True, slots=True)
class Draw:
    """A draft token that was sampled, and is accepted or rejected by its distribution."""

    parent: int
    """The node that it follows, or ROOT."""
    node: int
    """Its node. Two drafters may have drawn the same: that is one node and two draws."""
    distribution: RowLaw | None
    """What it was drawn from; None: what is left of that of the draw before it, which is a sibling's."""

    @property
    def is_one_token(self) -> bool:
        """Whether there was no choice: a deterministic token, tested as a draw."""
        return self.distribution is not None and self.distribution.scores.size == 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of one slot that a step verifies, ready for the forward."""

    slot: Slot
    tree: DraftTree
    """Empty for a plain step."""
    draws: Sequence[Draw] = ()
    """In the order in which they are tested: those of one parent by drafter, and each drafter's in the order in which
    it drew. Without any, draft tokens are accepted as far as they equal the target's own: under `greedy` and `coupled`,
    and for deterministic draft tokens under `rejection`. A node that is no draw is deterministic."""
    sources: Sequence[DraftSource] = ()
    """Who proposes, in the order of the tests."""
    ranks: Sequence[Mapping[int, int]] = ()
    """By source, the ranks of the nodes that it proposes among its own siblings."""
    rows_beside: ExtraRows | None = None
    """Rows that the slot's drafter has fed beside the tree, for later steps' sake."""
    fallback: Fallback | None = None
    """Why there are no draft tokens, where there were to be some."""

    @property
    def is_matched(self) -> bool:
        """Whether draft tokens are accepted as far as they equal the target's own."""
        return not self.draws

    @property
    def drafted_by(self) -> list[DraftSource]:
        """The sources of which some draft tokens are verified."""
        return [source for source, ranks in zip(self.sources, self.ranks, strict=True) if ranks]

    def source_of(self, node: int) -> DraftSource | None:
        """Return the first source that proposes a node; None for the grammar's."""
        for source, ranks in zip(self.sources, self.ranks, strict=True):
            if node in ranks:
                return source
        return None
