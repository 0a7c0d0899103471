"""The draft tokens of one slot that a step verifies, with the draws that rejection tests. Made by `draft_chooser`."""

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
    """Draft token that is accepted or rejected by the distribution that it was drawn from."""

    node: int
    """Node of the token in the tree. If two drafters drew the same token after one node, the node has two draws."""
    distribution: TokenDistribution | None
    """Distribution that the token was drawn from. None: that of the previous draw, which is a sibling, without the
    sibling's token."""

    @property
    def is_one_token(self) -> bool:
        """Whether the distribution has only one token, i.e. a deterministic draft token is tested as a draw."""
        return self.distribution is not None and self.distribution.scores.size == 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposal of one slot: the draft tokens that a step verifies, ready for the forward."""

    slot: Slot
    tree: DraftTree
    """Draft tree; empty for a step without draft tokens."""
    draws: Sequence[Draw] = ()
    """Draws in the order in which they are tested: after one node those of the first drafter, in the order in which it
    drew them, then those of the next. A node without a draw is deterministic. Without any draws, draft tokens are
    accepted as far as they equal the target's own tokens: under `greedy` and `coupled`, and under `rejection` if all
    are deterministic."""
    sources: Mapping[SlotDrafter, Mapping[int, int]] = field(default_factory=dict)
    """By drafter, in the order of the tests: its nodes, each with its rank among the drafter's own siblings."""
    extra_rows: ExtraRows | None = None
    """Extra rows that a drafter of the slot adds after the tree, to make draft tokens for later steps; None for
    none."""

    @property
    def drafted_by(self) -> list[SlotDrafter]:
        """Drafters of which at least one draft token is verified."""
        return [source for source, ranks in self.sources.items() if ranks]

    def drafter_of_node(self, node: int) -> SlotDrafter | None:
        """Return the first drafter that proposes a node; None if none does."""
        for source, ranks in self.sources.items():
            if node in ranks:
                return source
        return None

    def row(self) -> Row:
        """Return the slot's row of the forward: committed tokens that are not cached, then the tree, then the extra
        rows.

            2 uncached committed tokens, tree parents [-1, 0, 0]: row parents [-1, 0, 1, 2, 2]
        """
        slot = self.slot
        tail = slot.committed[len(slot.cached) :]
        new_ids = [*tail, *self.tree.ids]
        nodes = list(self.tree.parents)
        if self.extra_rows is not None:
            new_ids += self.extra_rows.ids
            nodes += self.extra_rows.parents
        parents = None
        if self.extra_rows is not None or not self.tree.is_chain:
            # The tail is the path to the tree's root: node 0 of the tree is token len(tail) of the row.
            parents = list(range(ROOT, len(tail) - 1))
            for parent in nodes:
                parents.append(len(tail) + parent)
        return Row(slot.table, new_ids, len(slot.cached), len(nodes) + 1, slot.cached, parents, source=slot.source)


def split_logits(proposals: Sequence[Proposal], logits: Tensor) -> tuple[Tensor, dict[SlotKey, Tensor]]:
    """Split the logits of a step. Return those that decide the slots, [sum(N_b + 1), V] for trees of N_b nodes, and by
    slot those after its E extra rows, [E, V].

    logits: [R, V] float32, the rows of the proposals in order.

        trees of 2 and 0 nodes, the first with 3 extra rows: rows 0, 1, 2 and 6 decide; rows 3, 4, 5 are the first
        slot's
    """
    beside = dict[SlotKey, Tensor]()
    if all(proposal.extra_rows is None for proposal in proposals):
        return logits, beside
    own = list[Tensor]()
    start = 0
    for proposal in proposals:
        end = start + len(proposal.tree) + 1
        own.append(logits[start:end])
        start = end
        if proposal.extra_rows is not None:
            end += len(proposal.extra_rows.ids)
            beside[proposal.slot.key] = logits[start:end]
            start = end
    return torch.cat(own), beside
