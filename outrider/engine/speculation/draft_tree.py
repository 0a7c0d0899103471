"""The draft tree: draft tokens that may follow a slot's committed tokens, as arrays over its nodes. Pure.

A node comes after its parent, and siblings stand in the order in which they were proposed. ROOT is the last committed
token, which is no node itself. A `CachedTree` also records which of its nodes lie in a worker's cache.

    the -> cat -> sat        node      0    1    2    3
        -> dog -> ran        ids     cat  dog  sat  ran
                             parents  -1   -1    0    1
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeVar

ROOT = -1
"""Index that stands for the last committed token, the parent of the first draft tokens."""

T = TypeVar("T")


def remap(column: Mapping[int, T], new_index: Mapping[int, int]) -> dict[int, T]:
    """Return a mapping by node with its keys replaced by new indices; nodes without a new index are dropped.

    {0: x, 1: y, 2: z} with new_index {0: ROOT, 2: 0}: {ROOT: x, 0: z}
    """
    values = dict[int, T]()
    for node, value in column.items():
        if node in new_index:
            values[new_index[node]] = value
    return values


class DraftTree:
    """Draft tree of N nodes, to which nodes are added. `reroot` renumbers the nodes. It returns their new indices, by
    which values that are kept by node must be renumbered (`remap`).
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Token id of each node, [N]."""
        self.parents: list[int] = []
        """Index of each node's parent, or ROOT, [N]."""
        self.ranks: list[int] = []
        """Rank of each node among its siblings, from 0 for the likeliest or first sampled one, [N]."""
        self.probs: list[float] = []
        """Probability that each node and all its ancestors are accepted, [N]."""
        self.depths: list[int] = []
        """Depth of each node, [N]: number of draft tokens from the first to the node; 1 for a child of ROOT."""
        self._children: dict[int, list[int]] = {}

    @classmethod
    def of(cls, ids: Iterable[int], parents: Iterable[int]) -> DraftTree:
        """Create a tree from token ids and parents, parents before children. All acceptance probabilities are 1."""
        tree = cls()
        for token_id, parent in zip(ids, parents, strict=True):
            tree.add(parent, token_id)
        return tree

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, parent: int, token_id: int, rank: int | None = None, prob: float = 1.0) -> int:
        """Add a child to a node or ROOT, and return the child's index. rank: rank among its siblings; by default the
        number of siblings that it has so far. prob: probability that the child and all its ancestors are accepted.
        """
        siblings = self._children.setdefault(parent, [])
        if rank is None:
            rank = len(siblings)
        node = len(self.ids)
        self.ids.append(token_id)
        self.parents.append(parent)
        self.ranks.append(rank)
        self.probs.append(prob)
        self.depths.append(self.depth(parent) + 1)
        siblings.append(node)
        return node

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node or ROOT, in the order in which they were added."""
        return self._children.get(node, ())

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of a node or ROOT with this token id; None if there is none."""
        for child in self._children.get(node, ()):
            if self.ids[child] == token_id:
                return child
        return None

    @property
    def is_chain(self) -> bool:
        """Whether each node is a child of the one before it."""
        return self.max_depth == len(self.ids)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first draft token to `node`, both included; an empty list for ROOT."""
        nodes = list[int]()
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def prefix(self, node: int) -> tuple[int, ...]:
        """Return the token ids on the path to a node, its own id last; an empty tuple for ROOT."""
        ids = list[int]()
        while node != ROOT:
            ids.append(self.ids[node])
            node = self.parents[node]
        return tuple(ids[::-1])

    def depth(self, node: int) -> int:
        """Return the number of draft tokens on the path to a node, itself included; 0 for ROOT."""
        if node == ROOT:
            return 0
        return self.depths[node]

    def prob(self, node: int) -> float:
        """Return the probability that a node and all its ancestors are accepted; 1 for ROOT."""
        if node == ROOT:
            return 1.0
        return self.probs[node]

    @property
    def max_depth(self) -> int:
        """Number of draft tokens on the longest path; 0 for an empty tree."""
        return max(self.depths, default=0)

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        """Make `node` the root, since it is now the last committed token. Only its descendants remain.

        dropped: nodes that are dropped too, with their descendants. Returns, ascending, the new index of each remaining
        node by its previous index.

            parents [-1, -1, 0, 1, 2], reroot(0): nodes 2 and 4 remain, parents [-1, 0]; returns {2: 0, 4: 1}
        """
        ids = self.ids
        parents = self.parents
        ranks = self.ranks
        probs = self.probs
        root_prob = self.prob(node)
        DraftTree.__init__(self)  # only the nodes begin anew, not the other attributes of a subclass
        new_index = {node: ROOT}
        for old, parent in enumerate(parents):
            if parent in new_index and old not in dropped:
                new_index[old] = self.add(new_index[parent], ids[old], ranks[old], probs[old] / root_prob)
        del new_index[node]
        return new_index

    def select(self, nodes: Iterable[int]) -> DraftTree:
        """Return a tree of some of the nodes, in this order. The parent of each must be ROOT or come before it.

        parents [-1, -1, 0], select([0, 2]): parents [-1, 0]
        """
        new_index = {ROOT: ROOT}
        tree = DraftTree()
        for node in nodes:
            parent = new_index[self.parents[node]]
            new_index[node] = tree.add(parent, self.ids[node], self.ranks[node], self.probs[node])
        return tree


NO_DRAFT_TOKENS = DraftTree()
"""Empty tree of slots without draft tokens; nothing is ever added to it. All such slots share it, so that no new object
per slot and step burdens the garbage collector."""

GONE = ROOT - 1
"""Index that stands for a cached node that was dropped from the tree."""


class CachedTree(DraftTree):
    """Draft tree that also records which of its nodes lie in a worker's cache, in the order in which they were fed.

    The cache holds all committed tokens but the last; then the last one, once ROOT is fed; then the nodes of `fed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_root_fed = False
        """Whether the cache holds the last committed token, which ROOT stands for."""
        self.fed: list[int] = []
        """Nodes in the cache, in the order in which they were fed. If nodes have been committed or dropped since, ROOT
        stands for each committed one and GONE for each dropped one, until `keep` is called."""

    def feed(self, node: int) -> None:
        """Record that a node or ROOT was fed, and lies in the cache after all nodes that were fed before."""
        if node == ROOT:
            self.is_root_fed = True
        else:
            self.fed.append(node)

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        path = self.path(node)
        if path:
            self.is_root_fed = node in self.fed
        new_index = super().reroot(node, dropped)
        index_of = dict.fromkeys([ROOT, *path], ROOT) | new_index
        self.fed = [index_of.get(old, GONE) for old in self.fed]
        return new_index

    def keep(self, nodes: Iterable[int]) -> list[int]:
        """Drop all nodes from `fed` but the given ones. Return the indices, in the previous `fed`, of the tokens that
        stay in the cache, ascending.

        In `fed`, ROOT stands for a node that was committed since it was fed, and GONE for one that was dropped since.
        The committed ones stay in the cache, but leave `fed`; they come first.

            fed [ROOT, 0, GONE, 1], keep([1]): returns [0, 3], and fed is [1]
        """
        kept = {ROOT, *nodes}
        indices = list[int]()
        fed = list[int]()
        for index, node in enumerate(self.fed):
            if node in kept:
                indices.append(index)
                if node != ROOT:
                    fed.append(node)
        self.fed = fed
        return indices

    def forget_cache(self) -> None:
        """Record that the cache holds no node any more."""
        self.is_root_fed = False
        self.fed = []
