"""A tree of drafts as it grows, level by level: which nodes are there, which go through the draft next. Pure, on the
host; called by the proposer.

Under `rejection` children are drawn from their parent's law without replacement, and what is drawn stays: a level's
nodes are shared out among its parents by what was drawn before and by the draft's laws, never by the value of the child
whose presence is decided. So the target's rule stays exact (`tree_acceptance.py`). Guesses under `greedy` and `coupled`
need no such care: of all that were looked at, the best are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.engine.sampling.row_law import RowLaw, draw_place
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.engine.step_plan import Row
from outrider.engine.worker.slots import Slot
from outrider.wire.tree_shape import TreeShape

Guesses = tuple[Sequence[int], Sequence[float]]
"""Distinct ids, best first, and how likely each is what the target says."""


@dataclass(frozen=True, slots=True)
class GrownNode:
    token_id: int
    parent: int
    path_prob: float
    """Of the path to it, under the draft."""
    prefix: tuple[int, ...]
    """Ids of the path to it, its own the last."""


class Urn:
    """Draws from a law without replacement."""

    def __init__(self, law: RowLaw) -> None:
        self.law = law
        self.drawn: list[int] = []
        self._weights = law.weights.copy()
        self.best_prob = float(self._weights.max()) / law.total
        """Largest probability, under the whole law, that is left; 0 when nothing is."""

    def draw(self, numbers: Iterator[float]) -> bool:
        """Draw one more id by the next number. Return False when nothing is left."""
        if self.best_prob == 0.0:
            return False
        place = draw_place(self._weights, next(numbers))
        self._weights[place] = 0.0
        self.best_prob = float(self._weights.max()) / self.law.total
        self.drawn.append(self.law.id_of(place))
        return True


@dataclass(slots=True)
class Growth:
    """Holds what a proposal has grown. `nodes` are all that were drawn or guessed, in the order in which they were."""

    shape: TreeShape
    nodes: list[GrownNode] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    """Nodes whose children come next, and whose logits are therefore wanted; empty = it is grown."""
    fed: list[int] = field(default_factory=list)
    """Nodes that go through the draft, in the order in which they do; the frontier is the end of them."""
    laws: dict[int, RowLaw] = field(default_factory=dict)
    """Under `rejection`: of each node that has children, what they were drawn from."""
    num_levels: int = 0

    @property
    def done(self) -> bool:
        return not self.frontier

    def prefix(self, node: int) -> tuple[int, ...]:
        return () if node == ROOT else self.nodes[node].prefix

    def most_drawn(self) -> int:
        """Return how many uniform numbers the next level may take."""
        if not self.shape.widths:
            return self._share()
        return len(self.frontier) * self.shape.widths[self.num_levels]

    def num_ranked(self) -> int:
        """Return how many guesses are wanted of each node of the frontier."""
        return self.shape.widths[self.num_levels] if self.shape.widths else self.shape.num_nodes

    def draw(self, laws: Sequence[RowLaw], uniforms: Sequence[float]) -> None:
        """Grow the next level under `rejection`. laws: of the frontier's nodes, as they will be sent; uniforms:
        `most_drawn` of them in (0, 1), independent of each other.
        """
        urns = [Urn(law) for law in laws]
        numbers = iter(uniforms)
        if self.shape.widths:
            for urn in urns:
                for _ in range(self.shape.widths[self.num_levels]):
                    urn.draw(numbers)
        else:
            self._share_out(urns, numbers)
        first = len(self.nodes)
        for node, urn in zip(self.frontier, urns, strict=True):
            if urn.drawn:
                self.laws[node] = urn.law
            for token_id in urn.drawn:
                self._add(node, token_id, urn.law.prob(token_id))
        self._grown(list(range(first, len(self.nodes))))

    def guess(self, guesses: Sequence[Guesses]) -> None:
        """Grow the next level under `greedy` and `coupled`. guesses: `num_ranked` of each frontier node, or all."""
        first = len(self.nodes)
        for node, (ids, probs) in zip(self.frontier, guesses, strict=True):
            for token_id, prob in zip(ids, probs, strict=True):
                self._add(node, token_id, prob)
        new = list(range(first, len(self.nodes)))
        if not self.shape.widths:
            among_best = set(self._best())
            width = min(self.shape.most_parents, self.shape.num_nodes - len(self.fed))
            new = sorted(sorted((n for n in new if n in among_best), key=self._by_path_prob)[:width])
        self._grown(new)

    def tree(self) -> tuple[DraftTree, list[RowLaw]]:
        """Return what is sent: the tree, and under `rejection` a law for each of its inner nodes in order."""
        kept = range(len(self.nodes)) if self.shape.widths or self.laws else self._best()
        place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        nodes = [self.nodes[node] for node in kept]
        tree = DraftTree(tuple(n.token_id for n in nodes), tuple(place[n.parent] for n in nodes))
        return tree, list(self.laws.values())

    def _share(self) -> int:
        """Of num_nodes, what the next level may have: equal parts, the first ones larger, and what is left over."""
        left = self.shape.num_nodes - len(self.nodes)
        return -(-left // (self.shape.depth - self.num_levels))

    def _share_out(self, urns: Sequence[Urn], numbers: Iterator[float]) -> None:
        """One child at a time, each to the parent whose best remaining one has the likeliest path."""
        path_probs = [1.0 if node == ROOT else self.nodes[node].path_prob for node in self.frontier]
        for _ in range(self._share()):
            best = max(range(len(urns)), key=lambda i: path_probs[i] * urns[i].best_prob)
            if not urns[best].draw(numbers):
                return

    def _add(self, parent: int, token_id: int, prob: float) -> None:
        before = 1.0 if parent == ROOT else self.nodes[parent].path_prob
        self.nodes.append(GrownNode(token_id, parent, before * prob, (*self.prefix(parent), token_id)))

    def _grown(self, new: list[int]) -> None:
        self.num_levels += 1
        self.frontier = new if self.num_levels < self.shape.depth and self._may_grow() else []
        self.fed.extend(self.frontier)

    def _may_grow(self) -> bool:
        return bool(self.shape.widths) or not self.laws or len(self.nodes) < self.shape.num_nodes

    def _best(self) -> list[int]:
        """The num_nodes of largest path probability, in the order of `nodes`: a parent is at least as likely as its
        children and comes before them, so that none is without its own.
        """
        return sorted(sorted(range(len(self.nodes)), key=self._by_path_prob)[: self.shape.num_nodes])

    def _by_path_prob(self, node: int) -> tuple[float, int]:
        return -self.nodes[node].path_prob, node


def tree_row(slot: Slot, growth: Growth) -> Row:
    """Return a tree's share of the next forward: all committed tokens and nodes to be fed that are not cached yet. The
    logits wanted are those of the frontier.
    """
    num_cached, num_committed = len(slot.cached), len(slot.committed)
    tail = slot.committed[num_cached:]
    new = growth.fed[max(0, num_cached - num_committed) :]
    new_ids = [*tail, *(growth.nodes[node].token_id for node in new)]
    place = {node: len(tail) + index for index, node in enumerate(growth.fed)} | {ROOT: len(tail) - 1}
    parents = [*range(-1, len(tail) - 1), *(place[growth.nodes[node].parent] for node in growth.fed)]
    return Row(slot.table, new_ids, num_cached, len(growth.frontier), slot.cached, parents if growth.fed else None)
