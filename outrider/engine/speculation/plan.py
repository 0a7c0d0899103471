"""The limits of a draft tree's growth: by what the request names, and by likelihood. Called by `tree`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from outrider.engine.speculation.ranks import MAX_RANKS, MIN_PROB, RankAcceptance, SlotAcceptance
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape

MAX_DEPTH = 12
"""Maximum depth of a tree under the last committed token, where the request names none."""
MAX_FED = 96
"""Maximum number of a slot's nodes in the cache at once."""
CANDIDATES = 1 << 16
"""Number of candidates reserved for each of several drafts at a position: more than one makes after a node."""

Place = tuple[int, ...]
"""Ranks of the nodes from the root to a node, its own the last; () for the root."""


class TreePlan:
    """The limits of one slot's draft tree."""

    def __init__(
        self,
        speculation: Speculation,
        params: SamplingParams,
        shares: SlotAcceptance,
        takes_trees: bool,
        fills_blocks: bool,
    ) -> None:
        """Create the limits. params: of the request. shares: acceptance probabilities of the slot. takes_trees and
        fills_blocks: as `NodeDrafter` has them.
        """
        self.shares = shares
        self.first_candidate = CANDIDATES * speculation.place
        """First candidate of this draft's uniform numbers at a position: each of several drafts has its own."""
        self._is_determined = params.is_deterministic
        self._is_narrow = not takes_trees or speculation.sequential
        self.has_keys = not self._is_narrow and not params.is_deterministic and not fills_blocks
        """Whether a node gets recovery nodes (KEY) as children."""
        self.places: Mapping[Place, int] = {}
        """Number of children that the request names for the node at each place; empty where it names none."""
        if speculation.tree is not None and takes_trees:
            self.places = places_of(speculation.tree)
        elif speculation.is_fixed:  # a chain of 3: {(): 1, (0,): 1, (0, 0): 1}
            self.places = {(0,) * depth: 1 for depth in range(speculation.max_depth)}
        self.max_ranked = max([MAX_RANKS, *self.places.values()])
        """Maximum number of children of a node."""
        named_depth = 0
        for place in self.places:
            named_depth = max(named_depth, len(place) + 1)
        self.max_depth = max(MAX_DEPTH, named_depth)
        """Maximum depth of the tree under the last committed token."""
        if speculation.is_plain:
            self.max_depth = 0
        elif speculation.sequential:
            self.max_depth = named_depth or speculation.max_draft_tokens

    def num_ranked(self, num_named: int, prob: float) -> int:
        """Return the number of children that a node is to have, sampled ones included.

        num_named: children that the request names for it. prob: acceptance probability of the node.
        """
        min_ranked = 0
        if self._is_determined:
            min_ranked = max(1, num_named)
        if self._is_narrow:
            return min_ranked
        num_likely = 0
        while num_likely < MAX_RANKS and prob * self.shares.share(num_likely) >= MIN_PROB:
            num_likely += 1
        return max(min_ranked, num_likely)


def places_of(shape: TreeShape) -> dict[Place, int]:
    """Return the number of children at each place of a shape.

    A shape with num_nodes has the likeliest places by rank. Their probabilities are the prior ones, so that a request
    is drafted for alike at any time.

    widths (2, 1): {(): 2, (0,): 1, (1,): 1}
    num_nodes 3, prior 0.6, 0.24, ..: {(): 2, (0,): 1}, a chain of 2 and a sibling of its first node
    """
    places: dict[Place, int] = {}
    if shape.widths:
        level: list[Place] = [()]
        for width in shape.widths:
            below = list[Place]()
            for place in level:
                places[place] = width
                for rank in range(width):
                    below.append((*place, rank))
            level = below
        return places
    shares = SlotAcceptance(RankAcceptance())
    heap: list[tuple[float, Place]] = [(-shares.share(0), (0,))]  # negated probabilities
    for _ in range(shape.num_nodes):
        negated, place = heapq.heappop(heap)
        parent = place[:-1]
        rank = place[-1]
        places[parent] = rank + 1
        negated_parent = negated / shares.share(rank)
        heapq.heappush(heap, (negated_parent * shares.share(rank + 1), (*parent, rank + 1)))
        if len(place) < shape.depth:
            heapq.heappush(heap, (negated * shares.share(0), (*place, 0)))
    return places
