"""What one slot's step verifies: a draft tree, and the draws that rejection tests, in the order of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from target_service.leases.lease import DraftSource


@dataclass(frozen=True, slots=True)
class Draw:
    """A draft token that was sampled, and is accepted or rejected by its distribution."""

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
    sources: Mapping[DraftSource, Mapping[int, int]] = field(default_factory=dict)
    """Who proposes, in the order of the tests: the ranks of the nodes of each among its own siblings."""
    rows_beside: ExtraRows | None = None
    """Rows that the slot's drafter has fed beside the tree, for later steps' sake."""

    @property
    def drafted_by(self) -> list[DraftSource]:
        """The sources of which some draft tokens are verified."""
        return [source for source, ranks in self.sources.items() if ranks]

    def source_of(self, node: int) -> DraftSource | None:
        """Return the first source that proposes a node; None for the grammar's."""
        for source, ranks in self.sources.items():
            if node in ranks:
                return source
        return None

    def row(self) -> Row:
        """Return what the forward is fed: the committed tokens that are not cached, the tree, the rows beside."""
        slot = self.slot
        tail = slot.committed[len(slot.cached) :]
        new_ids = [*tail, *self.tree.ids]
        nodes = list(self.tree.parents)
        if self.rows_beside is not None:
            new_ids += self.rows_beside.ids
            nodes += self.rows_beside.parents
        parents = None
        if self.rows_beside is not None or not self.tree.is_chain:
            # the path to each node begins with the committed tokens before it
            parents = [*range(-1, len(tail) - 1), *(len(tail) + parent for parent in nodes)]
        return Row(slot.table, new_ids, len(slot.cached), len(nodes) + 1, slot.cached, parents, source=slot.source)


def split_logits(proposals: Sequence[Proposal], logits: Tensor) -> tuple[Tensor, dict[SlotKey, Tensor]]:
    """Return the logits that slots are decided by, [sum(N_b + 1), V], and by slot those after its rows beside."""
    beside = dict[SlotKey, Tensor]()
    if all(proposal.rows_beside is None for proposal in proposals):
        return logits, beside
    own = list[Tensor]()
    start = 0
    for proposal in proposals:
        end = start + len(proposal.tree) + 1
        own.append(logits[start:end])
        start = end
        if proposal.rows_beside is not None:
            end += len(proposal.rows_beside.ids)
            beside[proposal.slot.key] = logits[start:end]
            start = end
    return torch.cat(own), beside
