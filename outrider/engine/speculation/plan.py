"""How a slot's draft tree may grow: by what the request names, and by the acceptance probabilities of ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from outrider.engine.speculation.ranks import LEAST_CHANCE, MAX_RANKS, RankShares, SlotShares
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape

MAX_DEPTH = 12
"""Depth under the last committed token that a tree grows to where nothing names one."""
MAX_FED = 96
"""Nodes of a slot that lie in the cache at once."""
CANDIDATES = 1 << 16
"""More than the draws that one draft makes after a node."""

Place = tuple[int, ...]
"""Ranks of the nodes that lead to a node, its own the last."""


class Plan:
    """How a slot's tree may grow: by what the request names, and by the chances of ranks."""

    def __init__(
        self,
        speculation: Speculation,
        params: SamplingParams,
        shares: SlotShares,
        takes_trees: bool,
        fills_blocks: bool,
    ) -> None:
        """takes_trees, fills_blocks: of the drafter."""
        self.shares = shares
        self.first_candidate = CANDIDATES * speculation.place
        """Of the numbers that are its own among those of several drafts for a position."""
        self._is_determined = params.determined
        self._is_narrow = not takes_trees or speculation.sequential
        self.has_keys = not self._is_narrow and not params.determined and not fills_blocks
        """Whether children are also proposed for what the target draws itself."""
        self.places: Mapping[Place, int] = {}
        """Number of nodes that the request names after each place under the last committed token."""
        if speculation.tree is not None and takes_trees:
            self.places = places_of(speculation.tree)
        elif speculation.is_fixed:
            self.places = {(0,) * depth: 1 for depth in range(speculation.max_depth)}
        self.max_ranked = max([MAX_RANKS, *self.places.values()])
        """Most children of a node."""
        named_depth = max((len(place) + 1 for place in self.places), default=0)
        self.max_depth = max(MAX_DEPTH, named_depth)
        if speculation.is_plain:
            self.max_depth = 0
        elif speculation.sequential:
            self.max_depth = named_depth or speculation.max_draft_tokens

    def num_ranked(self, num_named: int, prob: float) -> int:
        """Return how many children a node is to have, sampled ones included. num_named: as many as the request names;
        prob: acceptance probability of the node.
        """
        min_ranked = max(1, num_named) if self._is_determined else 0
        if self._is_narrow:
            return min_ranked
        num_likely = 0
        while num_likely < MAX_RANKS and prob * self.shares.share(num_likely) >= LEAST_CHANCE:
            num_likely += 1
        return max(min_ranked, num_likely)


def places_of(shape: TreeShape) -> dict[Place, int]:
    """Return how many tokens are proposed after each place of a shape: with num_nodes, those that are likeliest by
    rank, by the prior of all pairs, so that the same request is drafted for alike at any time.
    """
    places: dict[Place, int] = {}
    shares = SlotShares(RankShares())
    if shape.widths:
        level: list[Place] = [()]
        for width in shape.widths:
            places |= dict.fromkeys(level, width)
            level = [(*place, rank) for place in level for rank in range(width)]
        return places
    heap: list[tuple[float, Place]] = [(-shares.share(0), (0,))]
    for _ in range(shape.num_nodes):
        chance, place = heapq.heappop(heap)
        places[place[:-1]] = place[-1] + 1
        before = chance / shares.share(place[-1])
        heapq.heappush(heap, (before * shares.share(place[-1] + 1), (*place[:-1], place[-1] + 1)))
        if len(place) < shape.depth:
            heapq.heappush(heap, (chance * shares.share(0), (*place, 0)))
    return places
