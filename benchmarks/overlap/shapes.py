"""Trees of ranks, the same for every step: the likeliest nodes by how often a guess of each rank comes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Path = tuple[int, ...]
"""Ranks from the last committed token to a node, its own the last; () is that token."""


@dataclass(frozen=True)
class Shape:
    """A tree whose nodes are named by ranks, parents before their children, by depth."""

    paths: tuple[Path, ...]

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent; -1 for the last committed token."""
        place = {path: index for index, path in enumerate(self.paths)}
        return tuple(place.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """By depth from 0, the nodes that have children: what a step of the draft is fed. -1 alone is the first."""
        inner = sorted(set(self.parents))
        depths = {node: 0 if node < 0 else len(self.paths[node]) for node in inner}
        return tuple(tuple(node for node in inner if depths[node] == depth) for depth in range(self.depth))

    def num_children(self, node: int) -> int:
        return self.parents.count(node)


def best_shape(shares: Sequence[float], num_nodes: int, depth: int) -> Shape:
    """Return the likeliest nodes down to a depth. shares: how often the guess of each rank comes, falling."""
    heap: list[tuple[float, Path]] = [(-shares[0], (0,))]
    found = list[Path]()
    while heap and len(found) < num_nodes:
        chance, path = heapq.heappop(heap)
        found.append(path)
        rank = path[-1]
        if rank + 1 < len(shares):
            heapq.heappush(heap, (chance / shares[rank] * shares[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(heap, (chance * shares[0], (*path, 0)))
    return Shape(tuple(sorted(found, key=lambda path: (len(path), path))))
