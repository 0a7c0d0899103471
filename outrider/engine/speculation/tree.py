"""One slot's tree of drafts: what may follow the committed tokens, the likeliest first, grown without rounds. Pure.

A node is fed to learn what follows it; its children are made then. Which node is fed next, and how many children it
gets, goes by constants of rank and depth, never by what was drawn: under `rejection` nothing that is drawn may decide
what is verified. When tokens are committed, the node that stands for the last of them becomes the root and what hangs
below it stays, so that a guess that came true has its own followers ready.

Under `rejection` a *segment* is a chain (or a tree of a named shape) of drafts whose numbers are keyed by the committed
length at which it begins. Beside it hang keys: guesses of what the target may draw itself. Below a key another segment
begins, which is what would be drawn after that token was committed: a state has one proposal, however early it is made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.sampling.noise import Purpose
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS, RankShares, SlotShares
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from outrider.wire.tree_shape import TreeShape

LEAST_CHANCE = 0.01
"""Nodes that are less likely to come than this are not made. Halving it makes trees about a third larger."""
MAX_DEPTH = 12
"""Depth under the last committed token that a tree grows to where nothing names one. Doubling it lets a draft run twice
as far ahead of a target that stands still."""
MAX_FED = 96
"""Nodes of a slot that lie in the cache at once. Doubling it doubles what a tree may take there."""

CANDIDATES = 1 << 16
"""More than the draws that one draft makes after a node."""

Place = tuple[int, ...]
"""Ranks of the nodes that lead from where a segment begins to a node of it, its own the last."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A chain of laws."""

    start: int
    """committed_len at which it begins."""
    num_laws: Mapping[Place, int] | None
    """By place, how many tokens are drawn there; None: one everywhere."""
    topk: int | None
    """Laws are cut to so many ids before they are drawn from; None = whole."""


@dataclass(eq=False, slots=True)
class Node:
    """A draft token."""

    token_id: int
    position: int
    """Index of the token in the sequence."""
    parent: Node | None
    rank: int = 0
    kind: NodeKind = NodeKind.GUESS
    chance: float = 1.0
    """That it comes after what is committed, by its rank and those before it."""
    segment: Segment | None = None
    """Under `rejection`, the one that it belongs to; of a key or a root the one that begins below it, once known."""
    place: Place = ()
    law: RowLaw | None = None
    """What it was drawn from."""
    is_fed: bool = False
    children: list[Node] = field(default_factory=list)
    kept: Any = None
    """What its drafter keeps of it."""
    ranked: list[tuple[int, float]] = field(default_factory=list)
    """Further guesses of what follows, best first, that are no children yet: it may turn more likely that it comes."""

    def path(self, root: Node) -> list[int]:
        """Return the ids of the nodes below `root` that lead to it, its own the last."""
        ids: list[int] = []
        node: Node | None = self
        while node is not root:
            assert node is not None, "no node below this root"
            ids.append(node.token_id)
            node = node.parent
        return ids[::-1]

    def rank_of(self, token_id: int) -> int | None:
        """Return which of the tokens that were thought to follow a node this one is, made a child or not."""
        ids = (*(child.token_id for child in self.children), *(each for each, _ in self.ranked))
        return ids.index(token_id) if token_id in ids else None


class GrowingTree:
    """Of one slot. `fed` are its nodes in the cache, in order, after all committed tokens. `unsent` are those that are
    new, parents before their children, and `ended` those that nothing will follow: whoever sends them empties both.
    """

    def __init__(self, committed: Sequence[int], max_len: int, params: SamplingParams, plan: Plan) -> None:
        """max_len: most tokens that the slot may ever hold."""
        self.root = Node(committed[-1], len(committed) - 1, None)
        self.fed: list[Node] = []
        self.unsent: list[Node] = []
        self.ended: list[Node] = []
        self.plan = plan
        self._max_position = max_len - 2  # the target adds one of its own to what it accepts
        self._determined = params.determined
        self._unfed: list[tuple[float, int, Node]] = []
        self._named: list[Node] = []
        """Unfed nodes after which the request names others: the target waits for those."""
        self._is_told = False
        """Whether it was said that all which is named is here."""
        self._num_made = 0
        self._push(self.root)

    @property
    def committed_len(self) -> int:
        return self.root.position + 1

    def depth(self, node: Node) -> int:
        """Return how many drafts there are up to a node."""
        return node.position - self.root.position

    def offers(self, most: int) -> list[tuple[float, Node]]:
        """Return up to `most` nodes that are worth feeding, each with its chance, the best first."""
        if not self.root.is_fed:
            return [(1.0, self.root)] if self._may_follow(self.root) else []
        if self._named:  # the target waits for these, however unlikely they are
            return [(1.0, node) for node in self._named[:most]]
        found: list[tuple[float, Node]] = []
        taken: list[tuple[float, int, Node]] = []
        while self._unfed and len(found) < min(most, self.plan.most_fed - len(self.fed)):
            entry = heapq.heappop(self._unfed)
            node = entry[2]
            if node.is_fed:
                continue
            taken.append(entry)
            if node.chance * self.plan.shares.share(0) < LEAST_CHANCE:
                break
            if self._may_follow(node):
                found.append((node.chance, node))
        for entry in taken:
            heapq.heappush(self._unfed, entry)
        return found

    def wants(self, node: Node) -> bool:
        """Return whether a node that is not fed, of this tree or a guess of one, is offered as soon as all likelier
        ones are fed.
        """
        if not self._may_follow(node):
            return False
        if self._named:
            return self._rank_path(node) in self.plan.places
        is_likely = node.chance * self.plan.shares.share(0) >= LEAST_CHANCE
        return is_likely and len(self.fed) < self.plan.most_fed

    def guess(self, parent: Node, token_id: int) -> Node:
        """Return a guess of the first child that a node, of this tree or a guess itself, will have."""
        chance = parent.chance * self.plan.shares.share(0)
        return Node(token_id, parent.position + 1, parent, chance=chance)

    def is_end(self, node: Node) -> bool:
        """Return whether nothing will follow a node while what is committed stays as it is."""
        return node.position >= self._max_position

    @property
    def awaits_named(self) -> bool:
        """Return whether not all is grown yet that the request names under what is committed."""
        return bool(self._named)

    def note_grown(self) -> None:
        """Say, once, that all which the request names is grown: there may be fewer nodes than it names."""
        if self.plan.places and not self._named and not self._is_told:
            self._is_told = True
            self.ended.append(self.root)

    def _rank_path(self, node: Node) -> Place:
        ranks: list[int] = []
        while node is not self.root:
            assert node.parent is not None, "no node below the root"
            ranks.append(node.rank)
            node = node.parent
        return tuple(ranks[::-1])

    def _may_follow(self, node: Node) -> bool:
        """Return whether a child of this node is of use."""
        depth = self.depth(node)
        if node.position >= self._max_position or not self.plan.may_follow(node, depth):
            return False
        if not self._determined and node.kind is NodeKind.LAW and not self.num_laws(node):
            return self.plan.has_keys
        return True

    def num_laws(self, node: Node) -> int:
        """Return how many tokens are drawn after a node, under `rejection`."""
        segment = self.segment_after(node)
        return 1 if segment.num_laws is None else segment.num_laws.get(node.place, 0)

    def segment_after(self, node: Node) -> Segment:
        """Return the segment of what is drawn after a node; a new one after a key, and where none goes on."""
        if node.segment is None:
            node.segment = self.plan.segment(node.position + 1)
        return node.segment

    def num_ranked(self, node: Node) -> int:
        """Return how many guesses are wanted after a node, those that are drawn there counted, too."""
        num_named = self.plan.places.get(self._rank_path(node), 0) if self.plan.places else 0
        return self.plan.num_ranked(num_named, node.chance)

    def feed(self, node: Node) -> None:
        """Note that a node lies in the cache behind all that was fed before."""
        node.is_fed = True
        if node in self._named:
            self._named.remove(node)
        if node is not self.root:
            self.fed.append(node)

    def add(self, parent: Node, token_id: int, kind: NodeKind, law: RowLaw | None = None) -> Node:
        """Make the next child of a node. law: what it was drawn from."""
        rank, goes_on = len(parent.children), not self._determined and kind is not NodeKind.KEY
        child = Node(
            token_id,
            parent.position + 1,
            parent,
            rank,
            kind,
            parent.chance * self.plan.shares.share(rank),
            self.segment_after(parent) if goes_on else None,
            (*parent.place, rank) if goes_on else (),
            law,
        )
        parent.children.append(child)
        self.unsent.append(child)
        self._push(child)
        return child

    def add_ranked(self, parent: Node, guesses: Sequence[tuple[int, float]]) -> None:
        """Note what else may follow a node, best first with probabilities, and make those children that are wanted."""
        parent.ranked = list(guesses)
        self._fill(parent)

    def _fill(self, node: Node) -> None:
        """Make the children that are wanted now of those that are known."""
        kind = NodeKind.GUESS if self._determined else NodeKind.KEY
        for token_id, _ in node.ranked[: max(0, self.num_ranked(node) - len(node.children))]:
            self.add(node, token_id, kind)
            del node.ranked[0]

    def advance(self, ids: Sequence[int]) -> list[int]:
        """Go on under the tokens just committed. Return which of `fed` stay in the cache, as ascending indices:
        committed ones and what is below them.
        """
        node = self.root
        for token_id in ids:
            child = next((each for each in node.children if each.token_id == token_id), None)
            if node.children:
                self.plan.shares.note(node.rank_of(token_id))
            if child is None:
                return self._begin_at(Node(ids[-1], self.root.position + len(ids), None), node)
            node = child
        if not self._goes_on(node):
            assert node.parent is not None, "no token was committed"
            return self._begin_at(Node(node.token_id, node.position, None), node.parent)
        below = list(_below(node))
        kept = {id(each) for each in (node, *_ancestors(node), *below)}
        keep = [place for place, each in enumerate(self.fed) if id(each) in kept]
        here = {id(each) for each in below}
        self.fed = [each for each in self.fed if id(each) in here]
        self.unsent = [each for each in self.unsent if id(each) in here]
        self.ended = [each for each in self.ended if each is node or id(each) in here]
        chance = node.chance
        for each in (node, *below):
            each.chance /= chance
        node.parent, self.root, self._unfed, self._named, self._is_told = None, node, [], [], False
        for each in (node, *below):
            if not each.is_fed:
                self._push(each)
        for each in (node, *self.fed):
            self._fill(each)
        self.note_grown()
        return keep

    def _goes_on(self, node: Node) -> bool:
        """Return whether what hangs below a node is of use once it is committed. Under `rejection` it is not where the
        segment that it belongs to is over: what follows is drawn anew. A chain outlives the step that verified its
        beginning, and goes on with its own numbers: the target's own token in place of a draft is never that draft.
        """
        return self._determined or node.kind is NodeKind.KEY or self.num_laws(node) > 0

    def _begin_at(self, root: Node, last: Node) -> list[int]:
        """Begin anew at a token below which nothing is of use. last: the last node that stays in the cache."""
        path = {id(each) for each in (last, *_ancestors(last))}
        keep = [place for place, each in enumerate(self.fed) if id(each) in path]
        self.root = root
        self._forget()
        return keep

    def resend(self) -> None:
        """Let all that is known be sent again: what was sent may be lost. To a target that has it nothing changes."""
        self.unsent, self._is_told = list(_below(self.root)), False
        self.note_grown()

    def restart(self) -> None:
        """Grow anew from the root: what was fed is gone."""
        self.root.children, self.root.ranked, self.root.is_fed = [], [], False
        self._forget()

    def _forget(self) -> None:
        self.fed, self.unsent, self.ended, self._unfed, self._named, self._is_told = [], [], [], [], [], False
        self._push(self.root)

    def _push(self, node: Node) -> None:
        self._num_made += 1
        heapq.heappush(self._unfed, (-node.chance, self._num_made, node))
        if self.plan.places and self._rank_path(node) in self.plan.places and self._may_follow(node):
            self._named.append(node)


class Plan:
    """How a slot's tree may grow: by what the request names, and by the chances of ranks."""

    def __init__(
        self,
        speculation: Speculation,
        params: SamplingParams,
        shares: SlotShares,
        takes_trees: bool,
        topk: int | None,
        purpose: Purpose = Purpose.DRAFT,
        most_fed: int = MAX_FED,
        most_depth: int | None = None,
    ) -> None:
        """topk: laws are cut to so many ids; None = whole. purpose: of the numbers that they are drawn with. most_fed:
        nodes whose followers are known at once, but for those that the request names. most_depth: None = any.
        """
        self.shares = shares
        self.purpose = purpose
        self.topk = topk
        self.most_fed = most_fed
        self.most_depth = most_depth
        self.first_candidate = CANDIDATES * speculation.place
        """Of the numbers that are its own among those of several drafts for a position."""
        self._speculation = speculation
        self._determined = params.determined
        self._chain = not takes_trees or (speculation.sequential and speculation.tree is None)
        self.has_keys = not self._chain and not speculation.sequential and not params.determined
        """Whether guesses of what the target draws itself are made, too."""
        self.places: Mapping[Place, int] = {}
        """Of what the request names: how many nodes follow at each place under the last committed token."""
        if speculation.tree is not None and not self._chain:
            self.places = places_of(speculation.tree)
        elif speculation.is_fixed:
            tree = speculation.tree
            depth = speculation.chain_len(speculation.max_draft_tokens) if tree is None else tree.depth
            self.places = {(0,) * place: 1 for place in range(depth)}
        self._depth = max((len(place) + 1 for place in self.places), default=0)
        self.most_ranked = max(MAX_RANKS, *self.places.values(), 0)
        """Most children of a node."""

    def may_follow(self, node: Node, depth: int) -> bool:
        """Return whether there may be children of a node at that depth."""
        spec = self._speculation
        if spec.is_plain:
            return False
        deepest = (self._depth or spec.max_draft_tokens) if spec.sequential else max(MAX_DEPTH, self._depth)
        return depth < (deepest if self.most_depth is None else min(deepest, self.most_depth))

    def num_ranked(self, num_named: int, chance: float) -> int:
        """Return how many children of a node are guessed, or drawn and guessed, together."""
        least = max(1, num_named) if self._determined else 0
        if self._chain or self._speculation.sequential:
            return least
        num_likely = 0
        while num_likely < MAX_RANKS and chance * self.shares.share(num_likely) >= LEAST_CHANCE:
            num_likely += 1
        return max(least, num_likely)

    def segment(self, start: int) -> Segment:
        """Return the segment that begins at a committed length."""
        return Segment(start, self.places or None, self.topk)


def places_of(shape: TreeShape) -> dict[Place, int]:
    """Return how many tokens are drawn at each place of a shape: with num_nodes, those that are likeliest by rank. By
    the chances of a pair that nobody has seen, so that the same request is drafted for alike at any time.
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


def _below(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from _below(child)


def _ancestors(node: Node) -> Iterator[Node]:
    parent = node.parent
    while parent is not None:
        yield parent
        parent = parent.parent
