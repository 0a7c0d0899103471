"""A proposal that is a tree of drafts: which path of it is kept, and what comes after. On the host: no model, no I/O.

Rejection: Miao et al., "SpecInfer: accelerating large language model serving with tree-based speculative inference and
verification", ASPLOS 2024, Algorithm 2 (multi-step speculative sampling), for siblings that were drawn from one law
*without replacement* (Jeon et al., "Recursive speculative decoding", 2024): each is tested against what the target has
left over those before it, with the law that was left to draw it from. So it is at every node; where all children of the
last kept node are rejected, what the target has left is the law of what follows. Drafts that are guesses of what the
target says are walked as far as they match.

Exact for every tree that grows child by child, each drawn from what is left of its parent's law, whichever parent is
chosen for the next child, and when to stop, by what was drawn before: one more last child changes the law of nothing.
It splits the residual that would have been drawn from into what is kept of it and what is left, and after what is kept
the target goes on as it would have. Leaving out a child for its own value is what would not be exact.

Called by the target, for slots whose proposal is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.engine.sampling.acceptance import OwnDraw, residual
from outrider.engine.sampling.row_law import RowLaw, Weights

ROOT = -1
"""Stands for the last committed token, where a node's index is asked for."""


@dataclass(frozen=True)
class DraftTree:
    """N draft tokens. A node comes after its parent, and siblings in the order in which they were drawn."""

    ids: tuple[int, ...]
    """[N]"""
    parents: tuple[int, ...]
    """[N]: of each node the index of its parent, or ROOT."""

    @classmethod
    def checked(cls, ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Raises ValueError where a parent does not come before its child, or two siblings are the same token."""
        if len(ids) != len(parents):
            raise ValueError(f"{len(parents)} parents for {len(ids)} draft tokens")
        for node, parent in enumerate(parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent of draft token {node} is {parent}, must be from {ROOT} to {node - 1}")
        tree = cls(tuple(ids), tuple(parents))
        for parent, children in tree._children.items():
            if len({ids[child] for child in children}) < len(children):
                raise ValueError(f"draft tokens {list(children)} follow {parent} and repeat an id")
        return tree

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        """Children by parent, in the order of first children."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that lead to each node, itself the last."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            found.append((node,) if parent == ROOT else (*found[parent], node))
        return tuple(found)

    @property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children, ROOT among them, in the order of their first children."""
        return tuple(self._children)

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node or ROOT, in the order in which they were drawn."""
        return self._children.get(node, ())

    def depth(self, node: int) -> int:
        """Return the number of draft tokens up to a node; 0 of ROOT."""
        return 0 if node == ROOT else len(self.paths[node])

    def prefix(self, node: int) -> tuple[int, ...]:
        """Return the draft ids up to a node, its own the last; none of ROOT."""
        return () if node == ROOT else tuple(self.ids[i] for i in self.paths[node])

    def rank(self, node: int) -> int:
        """Return a node's place among its siblings."""
        return self.children(self.parents[node]).index(node)


@dataclass(frozen=True, slots=True)
class TreeWalk:
    """The decision of a round with a tree."""

    path: tuple[int, ...]
    """Nodes that are kept, from the first to the deepest."""
    next_id: int
    """Recovered where the last of them has children, else bonus."""


@dataclass(frozen=True, slots=True)
class TreeNoise:
    """One slot's numbers, independent of each other and of the drafts, those for nodes of earlier rounds, too."""

    accept: Sequence[float]
    """[N] uniforms in (0, 1), of each node. Only one node of a depth is ever walked to: those of equal depth and rank
    may share theirs."""
    own: OwnDraw
    """Draws what the target says itself after so many drafts, with numbers of the position."""


def accept_tree(
    tree: DraftTree, target_law: Callable[[int], RowLaw], draft_laws: Mapping[int, RowLaw], noise: TreeNoise
) -> TreeWalk:
    """Decide by recursive rejection without replacement.

    target_law(node): the target's law after a node or ROOT, asked for along one path. draft_laws: of every node that
    has children, what they were drawn from, one after the other, without replacement. Raises NothingToDraw.
    """
    node, path = ROOT, list[int]()
    while True:
        target, children = target_law(node), tree.children(node)
        if not children:
            return TreeWalk(tuple(path), target.id_of(noise.own(len(path), target.weights, target.ids)))
        ids, accept = [tree.ids[child] for child in children], [noise.accept[child] for child in children]
        kept, left = _first_kept(target, draft_laws[node], ids, accept)
        if kept is None:
            return TreeWalk(tuple(path), target.id_of(noise.own(len(path), left, target.ids)))
        node = children[kept]
        path.append(node)


def walk_matching(tree: DraftTree, says: Callable[[int], int]) -> TreeWalk:
    """Decide for greedy and coupled. says(node): the target's token after a node or ROOT, asked for along one path."""
    node, path = ROOT, list[int]()
    while True:
        own = says(node)
        found = [child for child in tree.children(node) if tree.ids[child] == own]
        if not found:
            return TreeWalk(tuple(path), own)
        node = found[0]
        path.append(node)


def _first_kept(
    target: RowLaw, draft: RowLaw, ids: Sequence[int], accept: Sequence[float]
) -> tuple[int | None, Weights]:
    """Return the first sibling that is kept, None when none is, and what the target has left then: weights [N] of the
    entries of its law.
    """
    left = target.probs()
    for rank, token_id in enumerate(ids):
        place, draft_prob = target.place_of(token_id), draft.prob(token_id)
        if place is not None and draft_prob > 0 and accept[rank] < left[place] / draft_prob:
            return rank, left
        left = residual(left, draft.probs_at(target))
        left = left / left.sum()
        draft = draft.without(token_id)
    return None, left
