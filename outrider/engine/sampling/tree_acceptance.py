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

Several sources may draw after the same node, each from a law of its own: their draws are tested source by source, in
an order that nothing drawn decides, and a token that two of them drew is one node and two draws. A child that nobody
drew is a guess: where all draws are rejected the target draws from what it has left, and goes on behind the guess that
says so.

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

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node or ROOT, in the order in which they were drawn."""
        return self._children.get(node, ())

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of a node or ROOT that is this token; None where there is none."""
        return next((child for child in self.children(node) if self.ids[child] == token_id), None)

    def depth(self, node: int) -> int:
        """Return the number of draft tokens up to a node; 0 of ROOT."""
        return 0 if node == ROOT else len(self.paths[node])

    def prefix(self, node: int) -> tuple[int, ...]:
        """Return the draft ids up to a node, its own the last; none of ROOT."""
        return () if node == ROOT else tuple(self.ids[i] for i in self.paths[node])


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one source drew after a node."""

    law: RowLaw
    """What the first was drawn from; each further one from what is left of it."""
    nodes: tuple[int, ...]
    """In the order in which they were drawn."""


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

    accept: Mapping[tuple[int, int], float]
    """Uniforms in (0, 1), by how many drafts are kept before and by place among all that was drawn there. Only one node
    of a depth is ever walked to, so that all of equal depth share theirs."""
    own: OwnDraw
    """Draws what the target says itself after so many drafts, with numbers of the position."""


def accept_tree(
    tree: DraftTree, target_law: Callable[[int], RowLaw], drawn: Mapping[int, Sequence[Drawn]], noise: TreeNoise
) -> TreeWalk:
    """Decide by recursive rejection.

    target_law(node): the target's law after a node or ROOT, asked for along one path. drawn: after each node, what was
    drawn there, in the order in which it is tested; children that are not among it are guesses. Raises NothingToDraw.
    """
    node, path = ROOT, list[int]()
    while True:
        target = target_law(node)
        kept, left = _first_kept(target, tree, drawn.get(node, ()), lambda place: noise.accept[len(path), place])
        if kept is None:
            own = target.id_of(noise.own(len(path), left, target.ids))
            kept = tree.child(node, own)
            if kept is None:
                return TreeWalk(tuple(path), own)
        node = kept
        path.append(node)


def walk_matching(tree: DraftTree, says: Callable[[int], int]) -> TreeWalk:
    """Decide for greedy and coupled. says(node): the target's token after a node or ROOT, asked for along one path."""
    node, path = ROOT, list[int]()
    while True:
        own = says(node)
        found = tree.child(node, own)
        if found is None:
            return TreeWalk(tuple(path), own)
        node = found
        path.append(node)


def _first_kept(
    target: RowLaw, tree: DraftTree, drawn: Sequence[Drawn], accept: Callable[[int], float]
) -> tuple[int | None, Weights]:
    """Return the first draw that is kept, None when none is, and what the target has left then: weights [N] of the
    entries of its law. accept(place): the number of a draw.
    """
    if not drawn:
        return None, target.weights
    left, tested = target.probs(), 0
    for each in drawn:
        draft = each.law
        for node in each.nodes:
            token_id = tree.ids[node]
            place, draft_prob = target.place_of(token_id), draft.prob(token_id)
            if place is not None and draft_prob > 0 and accept(tested) < left[place] / draft_prob:
                return node, left
            left = residual(left, draft.probs_at(target))
            left = left / left.sum()
            draft = draft.without(token_id)
            tested += 1
    return None, left
