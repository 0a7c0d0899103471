"""The draft tree: draft tokens that may follow a slot's committed tokens, as arrays over its nodes. Pure.

A node comes after its parent, and siblings stand in the order in which they were proposed. ROOT is the last committed
token, which is no node itself.

    the -> cat -> sat        node      0    1    2    3
        -> dog -> ran        ids     cat  dog  sat  ran
                             parents  -1   -1    0    1
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeVar

ROOT = -1
"""Index of the last committed token, the parent of the first draft tokens."""

T = TypeVar("T")


def moved(column: Mapping[int, T], new_index: Mapping[int, int]) -> dict[int, T]:
    """Return values by node as they are after nodes have moved; those of nodes without a new index go."""
    return {new_index[node]: value for node, value in column.items() if node in new_index}


class DraftTree:
    """A growable tree. `reroot` returns how values by node that are kept beside it move."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Token ids, [N]."""
        self.parents: list[int] = []
        """Index of each node's parent, or ROOT, [N]."""
        self.ranks: list[int] = []
        """Order of each node among its siblings, the likeliest or first sampled one 0, [N]."""
        self.probs: list[float] = []
        """Acceptance probability of each node, that of its ancestors included, [N]."""
        self.depths: list[int] = []
        """Number of draft tokens up to each node, itself included, [N]."""
        self._children: dict[int, list[int]] = {}

    @classmethod
    def of(cls, ids: Iterable[int], parents: Iterable[int]) -> DraftTree:
        """Create a tree of these nodes, parents before their children, whose acceptance probabilities do not matter."""
        tree = cls()
        for token_id, parent in zip(ids, parents, strict=True):
            tree.add(parent, token_id)
        return tree

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, parent: int, token_id: int, rank: int | None = None, prob: float = 1.0) -> int:
        """Append a child of `parent` and return its index. rank: the number of its siblings so far unless given."""
        siblings = self._children.setdefault(parent, [])
        node = len(self.ids)
        self.ids.append(token_id)
        self.parents.append(parent)
        self.ranks.append(len(siblings) if rank is None else rank)
        self.probs.append(prob)
        self.depths.append(self.depth(parent) + 1)
        siblings.append(node)
        return node

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node or ROOT, in the order in which they were added."""
        return self._children.get(node, ())

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of a node or ROOT that is this token; None where there is none."""
        for child in self._children.get(node, ()):
            if self.ids[child] == token_id:
                return child
        return None

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.max_depth == len(self.ids)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first draft token to `node`, both included; none for ROOT."""
        nodes = list[int]()
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def prefix(self, node: int) -> tuple[int, ...]:
        """Return the draft token ids up to a node, its own the last; none for ROOT."""
        return tuple(self.ids[each] for each in self.path(node))

    def depth(self, node: int) -> int:
        """Return the number of draft tokens up to a node; 0 for ROOT."""
        return 0 if node == ROOT else self.depths[node]

    def prob(self, node: int) -> float:
        """Return the acceptance probability of a node; 1 for ROOT."""
        return 1.0 if node == ROOT else self.probs[node]

    @property
    def max_depth(self) -> int:
        """Number of draft tokens on the longest path; 0 for an empty tree."""
        return max(self.depths, default=0)

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        """Make `node` the last committed token: drop all nodes but its descendants, and those that are `dropped` with
        theirs.

        Returns the index of each node that remains, by its previous index, ascending.
        """
        ids, parents, ranks, probs = self.ids, self.parents, self.ranks, self.probs
        above = self.prob(node)
        DraftTree.__init__(self)  # the nodes alone begin anew, not what a kind of tree keeps beside them
        new_index = {node: ROOT}
        for old, parent in enumerate(parents):
            if parent in new_index and old not in dropped:
                new_index[old] = self.add(new_index[parent], ids[old], ranks[old], probs[old] / above)
        del new_index[node]
        return new_index

    def select(self, nodes: Iterable[int]) -> DraftTree:
        """Return the tree of some nodes, parents before their children; each one's parent is among them."""
        new_index = {ROOT: ROOT}
        tree = DraftTree()
        for node in nodes:
            parent = new_index[self.parents[node]]
            new_index[node] = tree.add(parent, self.ids[node], self.ranks[node], self.probs[node])
        return tree


NO_DRAFT_TOKENS = DraftTree()
"""The tree of a slot without draft tokens. Nobody adds to it: one for each slot and step would keep the garbage
collector busy."""
