"""The draft tokens of one slot that a step verifies, with the draws that rejection tests. Made by `choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from target_service.leases.lease import SlotDrafter


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled draft token, which is accepted or rejected by its distribution."""

    node: int
    """Node of the token. Where two drafters drew the same token after one node, it has two draws."""
    distribution: TokenDistribution | None
    """Distribution that it was drawn from; None: that of the previous draw, a sibling, without the sibling's token."""

    @property
    def is_one_token(self) -> bool:
        """Whether the distribution has one token: a deterministic draft token that is tested as a draw."""
        return self.distribution is not None and self.distribution.scores.size == 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of one slot that a step verifies, ready for the forward."""

    slot: Slot
    tree: DraftTree
    """Empty for a plain step."""
    draws: Sequence[Draw] = ()
    """Draws in the order of the tests: those after one node drafter by drafter, and each drafter's as it drew them.
    Without draws, draft tokens are accepted as far as they equal the target's tokens: under `greedy` and `coupled`, and
    deterministic ones under `rejection`. A node without a draw is deterministic."""
    sources: Mapping[SlotDrafter, Mapping[int, int]] = field(default_factory=dict)
    """By drafter, in the order of the tests: the ranks of its nodes among its own siblings."""
    rows_beside: ExtraRows | None = None
    """Rows that a drafter of the slot has fed beside the tree, for draft tokens of later steps."""

    @property
    def drafted_by(self) -> list[SlotDrafter]:
        """The drafters of which some draft tokens are verified."""
        return [source for source, ranks in self.sources.items() if ranks]

    def drafter_of_node(self, node: int) -> SlotDrafter | None:
        """Return the first drafter that proposes a node; None for a node of none."""
        for source, ranks in self.sources.items():
            if node in ranks:
                return source
        return None

    def row(self) -> Row:
        """Return the row of the forward: the committed tokens that are not cached, the tree, the rows beside.

        tail of 2 tokens, tree parents [-1, 0, 0]: row parents [-1, 0, 1, 2, 2]
        """
        slot = self.slot
        tail = slot.committed[len(slot.cached) :]
        new_ids = [*tail, *self.tree.ids]
        nodes = list(self.tree.parents)
        if self.rows_beside is not None:
            new_ids += self.rows_beside.ids
            nodes += self.rows_beside.parents
        parents = None
        if self.rows_beside is not None or not self.tree.is_chain:
            # The tail is the path to the tree's root: node 0 of the tree is token len(tail) of the row.
            parents = list(range(ROOT, len(tail) - 1))
            for parent in nodes:
                parents.append(len(tail) + parent)
        return Row(slot.table, new_ids, len(slot.cached), len(nodes) + 1, slot.cached, parents, source=slot.source)


def split_logits(proposals: Sequence[Proposal], logits: Tensor) -> tuple[Tensor, dict[SlotKey, Tensor]]:
    """Return the logits by which slots are decided, [sum(N_b + 1), V], and by slot those of its E rows beside, [E, V].

    logits: [R, V] float32, the rows of the proposals in order.

        trees of 2 and 0 nodes, the first with 3 rows beside: rows 0, 1, 2 and 6; rows 3, 4, 5 of the first slot
    """
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
