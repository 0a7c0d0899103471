"""The limits of a draft tree's growth: by what the request fixes, and by likelihood. Called by `growing_tree`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from outrider.engine.speculation.ranks import MAX_RANKS, MIN_PROB, RankAcceptance, SlotAcceptance
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape

MAX_DEPTH = 12
"""Maximum depth of a tree below the last committed token, unless the request fixes a larger one."""
MAX_FED = 96
"""Maximum number of nodes that one slot has in the cache at once."""
SAMPLES_PER_DRAFT_WORKER = 1 << 16
"""Number of random numbers at a position that are set aside for each draft worker, since several may draft for one
slot. It is larger than the number of children that a draft worker draws after a node."""

PathRanks = tuple[int, ...]
"""Ranks of the nodes on the path from the root to a node, its own rank last; () for the root."""


class TreePlan:
    """Limits of one slot's draft tree."""

    def __init__(
        self,
        speculation: Speculation,
        params: SamplingParams,
        acceptance: SlotAcceptance,
        supports_trees: bool,
        is_block_drafter: bool,
    ) -> None:
        """Create the limits. params: the request's. acceptance: acceptance probabilities in the slot. supports_trees,
        is_block_drafter: as in `NodeDrafter`.
        """
        self.acceptance = acceptance
        self.first_sample_index = SAMPLES_PER_DRAFT_WORKER * speculation.draft_index
        """Index of the first of a position's uniform random numbers that this draft worker uses: one for each draft
        token that it draws there. Each draft worker has its own range, so that their draws are independent."""
        self._is_determined = params.is_deterministic
        self._is_narrow = not supports_trees or speculation.is_sequential
        self.has_recovery_nodes = not self._is_narrow and not params.is_deterministic and not is_block_drafter
        """Whether nodes get recovery nodes as children."""
        self.num_children: Mapping[PathRanks, int] = {}
        """Number of children of each node that has children in the tree shape or chain that the request fixes. A node
        is given by the ranks on the path from the root to it. Empty if the request fixes neither."""
        if speculation.tree is not None and supports_trees:
            self.num_children = num_children_of(speculation.tree)
        elif speculation.is_fixed:  # a chain of 3: {(): 1, (0,): 1, (0, 0): 1}
            self.num_children = {(0,) * depth: 1 for depth in range(speculation.max_depth)}
        self.max_ranked = max([MAX_RANKS, *self.num_children.values()])
        """Maximum number of children of a node."""
        named_depth = 0
        for ranks in self.num_children:
            named_depth = max(named_depth, len(ranks) + 1)
        self.max_depth = max(MAX_DEPTH, named_depth)
        """Maximum depth of the tree below the last committed token."""
        if speculation.is_plain:
            self.max_depth = 0
        elif speculation.is_sequential:
            self.max_depth = named_depth or speculation.max_draft_tokens

    def num_ranked(self, num_required: int, prob: float) -> int:
        """Return how many children a node should have now: sampled ones, likeliest ids and recovery nodes together.

        num_required: number of children that the request fixes for it. prob: probability that it and all its
        ancestors are accepted.
        """
        min_ranked = 0
        if self._is_determined:
            min_ranked = max(1, num_required)
        if self._is_narrow:
            return min_ranked
        num_likely = 0
        while num_likely < MAX_RANKS and prob * self.acceptance.prob(num_likely) >= MIN_PROB:
            num_likely += 1
        return max(min_ranked, num_likely)


def num_children_of(shape: TreeShape) -> dict[PathRanks, int]:
    """Return the number of children of each node of a requested tree shape. A node is given by the ranks on the path
    from the root to it.

    A shape that gives only num_nodes gets the likeliest nodes, by fixed acceptance probabilities: 0.6 for rank 0, 0.24
    for rank 1, .. So the tree of a request is the same at any time.

        widths (2, 1): {(): 2, (0,): 1, (1,): 1}
        num_nodes 3: {(): 2, (0,): 1}, a chain of 2 and a sibling of its first node
    """
    num_children: dict[PathRanks, int] = {}
    if shape.widths:
        level: list[PathRanks] = [()]
        for width in shape.widths:
            below = list[PathRanks]()
            for ranks in level:
                num_children[ranks] = width
                for rank in range(width):
                    below.append((*ranks, rank))
            level = below
        return num_children
    acceptance = SlotAcceptance(RankAcceptance())
    heap: list[tuple[float, PathRanks]] = [(-acceptance.prob(0), (0,))]  # negated probabilities
    for _ in range(shape.num_nodes):
        negated, ranks = heapq.heappop(heap)
        parent = ranks[:-1]
        rank = ranks[-1]
        num_children[parent] = rank + 1
        negated_parent = negated / acceptance.prob(rank)
        heapq.heappush(heap, (negated_parent * acceptance.prob(rank + 1), (*parent, rank + 1)))
        if len(ranks) < shape.depth:
            heapq.heappush(heap, (negated * acceptance.prob(0), (*ranks, 0)))
    return num_children
