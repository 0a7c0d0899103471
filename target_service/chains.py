"""Chains of drafts that the target makes itself, when a slot is taken into a step: no ticket, and no wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import Said, of_logits
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import Plan
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.worker.slots import Slot
from outrider.wire.speculation import Speculation
from target_service.lease import Candidate, Draft

Say = Callable[[GrowingTree, int], Said | None]
"""Returns what follows the last node of a chain; None where nothing is known of it."""


def as_chain(nodes: Sequence[Draft], share: float) -> list[Candidate]:
    """Return a chain whose nodes are each kept with the chance `share` when the one before was."""
    chances = accumulate([share] * len(nodes), mul)
    return [(chance, node, index - 1) for index, (chance, node) in enumerate(zip(chances, nodes, strict=True))]


def grown_chain(slot: Slot, shares: SlotShares, most: int, say: Say) -> list[Candidate]:
    """Return a chain of at most `most` drafts, fewer where there is nothing more to say."""
    chain = Speculation(num_draft_tokens=most, max_draft_tokens=most, sequential=True)
    plan = Plan(chain, slot.params, shares, takes_trees=False, topk=None, purpose=Purpose.OWN_DRAFT)
    tree = GrowingTree(slot.committed, slot.max_len, slot.params, plan)
    found, node = list[ChainToken](), ROOT
    while tree.offers(1) and (said := say(tree, node)) is not None:
        tree.feed(node)
        grow([said])
        if not tree.children(node) or (node in tree.ended and node != ROOT):  # the root ends once all is grown
            break
        node = tree.children(node)[0]
        found.append(ChainToken(tree.ids[node], tree.kinds[node], tree.distributions.get(node)))
    return as_chain(found, shares.share(0))


class ChainToken(NamedTuple):
    token_id: int
    kind: NodeKind
    law: RowLaw | None
    rank: int = 0


def chain_of_logits(
    slot: Slot, state: SamplingState, shares: SlotShares, most: int, logits: HostLogits, num_positions: int
) -> list[Candidate]:
    """Return a chain of which draft j follows logits j, whatever was drafted before it."""

    def say(tree: GrowingTree, node: int) -> Said | None:
        depth = tree.depth(node)
        return of_logits(tree, node, state, logits, depth) if depth < num_positions else None

    return grown_chain(slot, shares, most, say)
