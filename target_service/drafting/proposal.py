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
    """A draft token that was drawn from a distribution. The target accepts or rejects it by a test of that distribution
    and the target's own.
    """

    node: int
    """Index of the token's node in the tree. If two drafters drew the same token after the same node, the tree has one
    node for it, and the node has two draws."""
    distribution: TokenDistribution | None
    """Distribution that the token was drawn from. None = the distribution of the previous draw with that draw's token
    removed: both are siblings of one drafter, drawn without replacement."""

    @property
    def is_one_token(self) -> bool:
        """Whether the distribution has only one token. This is so for a deterministic draft token that is tested as if
        it had been drawn: in a chain that also has sampled tokens, or under lenience.
        """
        return self.distribution is not None and self.distribution.scores.size == 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one slot that a step verifies, ready for the forward."""

    slot: Slot
    tree: DraftTree
    """Draft tree; empty for a step without draft tokens."""
    draws: Sequence[Draw] = ()
    """Draws in the order in which they are tested: among the children of one node, the first drafter's in the order in
    which it drew them, then the next drafter's. If there are no draws at all, draft tokens are accepted as long as they
    equal the target's own tokens. This is so for `greedy` and `coupled`, and for `rejection` if all draft tokens are
    deterministic."""
    slot_drafters: Mapping[SlotDrafter, Mapping[int, int]] = field(default_factory=dict)
    """For each drafter, in the order in which draws are tested: the nodes of the tree that it proposed, each with its
    rank among the siblings that this drafter proposed."""
    extra_rows: ExtraRows | None = None
    """Rows that a drafter of the slot adds after the tree, to make draft tokens for later steps. None = no such
    rows."""

    @property
    def drafted_by(self) -> list[SlotDrafter]:
        """Drafters that proposed at least one of the tree's nodes."""
        return [slot_drafter for slot_drafter, ranks in self.slot_drafters.items() if ranks]

    def drafter_of_node(self, node: int) -> SlotDrafter | None:
        """Return the drafter that proposed a node, the first one if several did; None if `slot_drafters` has none."""
        for slot_drafter, ranks in self.slot_drafters.items():
            if node in ranks:
                return slot_drafter
        return None

    def row(self) -> Row:
        """Return what the forward is fed for the slot: the committed tokens that are not cached, then the tree, then
        the extra rows, from which draft tokens for later steps are made.

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
    """Split the logits of a step. Return two parts: the logits that decide the slots, [sum(N_b + 1), V] for trees of
    N_b nodes; and by slot the logits after its E extra rows, [E, V], which its drafter reads.

    logits: [R, V] float32, the rows of the proposals in order.

        trees of 2 and 0 nodes, the first with 3 extra rows: rows 0, 1, 2 and 6 decide; rows 3, 4, 5 are the first
        slot's
    """
    extra_logits = dict[SlotKey, Tensor]()
    if all(proposal.extra_rows is None for proposal in proposals):
        return logits, extra_logits
    own = list[Tensor]()
    start = 0
    for proposal in proposals:
        end = start + len(proposal.tree) + 1
        own.append(logits[start:end])
        start = end
        if proposal.extra_rows is not None:
            end += len(proposal.extra_rows.ids)
            extra_logits[proposal.slot.key] = logits[start:end]
            start = end
    return torch.cat(own), extra_logits
