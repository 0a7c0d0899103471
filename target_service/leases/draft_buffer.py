"""The draft buffer: draft tokens received for one slot under one ticket and not yet verified. No tensors.

It mirrors the draft worker's tree under the committed tokens. A delivery names positions and stands alone: a node on
the committed tokens is late and counted; one that disagrees with them, or whose parent is missing, is dropped; the
others stay until the target commits something else. The first delivery of a node counts: under `rejection` a node has
one set of draws, whoever delivers it twice. Runs on the engine thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.speculation.candidates import EncodedDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.nodes import MAX_BUFFERED_NODES, Delivery, InsertedNodes, NodeKind
from outrider.wire.requests.params import MAX_DRAFT_TOKENS
from outrider.wire.requests.tree_shape import TreeShape

NODE_BYTES = 256
"""Bytes of a delivery of one token without its distribution: 60 of ticket, epoch and position, and 10 for each node up
to it."""


def buffer_bytes(num_slots: int, vocab_size: int, memory_bytes: int) -> int:
    """Return the bytes that the draft buffers of all slots may take.

    A slot can verify MAX_DRAFT_TOKENS tokens, and the heaviest comes with the log-probs of the whole vocabulary,
    4 bytes an id. All slots together take at most memory_bytes for these; tokens without log-probs always have room.
    """
    num_tokens = num_slots * MAX_DRAFT_TOKENS
    return num_tokens * NODE_BYTES + min(num_tokens * 4 * vocab_size, memory_bytes)


@dataclass(slots=True)
class DeliveryCost:
    """What a draft worker spent on one delivery."""

    us: int
    """Microseconds; 0 once a verdict has reported them."""


@dataclass(slots=True)
class BufferedToken:
    """What is known of a node beside its place in the tree."""

    kind: NodeKind
    num_bytes: int
    distribution: EncodedDistribution | None
    """What it was sampled from; None but for LAW."""
    step_len: int | None
    """Committed length of the step that was running when it arrived; None: none was."""
    cost: DeliveryCost | None
    """Of all nodes of its delivery; None where the draft worker does not say."""


class DraftBuffer:
    """Node i of `tree` is described by `tokens[i]`."""

    def __init__(self) -> None:
        self.num_wasted = 0
        """Draft tokens that arrived too late since the last verdict."""
        self.clear()

    def clear(self) -> None:
        """Drop all nodes."""
        self.tree = DraftTree()
        self.tokens: list[BufferedToken] = []
        self.num_bytes = 0
        self.ended: set[int] = set()
        """Nodes, or ROOT, that nothing will follow which is waited for."""

    def insert(
        self, delivery: Delivery, committed: Sequence[int], max_bytes: int, *, in_step: bool = False
    ) -> InsertedNodes:
        """Take in a delivery. committed: the slot's tokens; max_bytes: what the buffer may hold; in_step: a step is
        running, which verifies without it.
        """
        num_new = sum(kind is not NodeKind.KNOWN for kind in delivery.kinds)
        node_bytes = -(-delivery.num_bytes // max(1, num_new))
        cost = DeliveryCost(delivery.draft_us) if delivery.draft_us else None
        step_len = len(committed) if in_step else None
        distributions = dict[int, EncodedDistribution]()
        """By the parent's index, of the sampled nodes after it."""
        place_of = dict[int, int]()
        """By index the node, or ROOT, or below ROOT by one for each committed token that follows."""
        if delivery.root_len <= len(committed):
            place_of[ROOT] = ROOT + delivery.root_len - len(committed)
        num_late = num_dropped = 0
        is_full = False
        for index, (token_id, above, kind) in enumerate(
            zip(delivery.ids, delivery.parents, delivery.kinds, strict=True)
        ):
            is_new = kind is not NodeKind.KNOWN
            distribution = None
            if kind is NodeKind.LAW:
                assert delivery.rows is not None, "sampled nodes without distributions"
                distribution = distributions.setdefault(above, (delivery.rows, len(distributions)))
            parent = place_of.get(above)
            place: int | None = None
            if parent is not None and parent < ROOT:
                if token_id == committed[parent + 1]:
                    place = parent + 1
                    num_late += kind in (NodeKind.GUESS, NodeKind.LAW)
            elif parent is not None:
                place = self.tree.child(parent, token_id)
                if place is None and is_new and self.num_bytes + node_bytes > max_bytes:
                    is_full = True
                    self.ended.add(parent)  # the draft worker takes it for delivered: nobody is to wait for it
                elif place is None and is_new:
                    token = BufferedToken(kind, node_bytes, distribution, step_len, cost)
                    place = self._add(parent, token_id, delivery.ranks[index], token)
            if place is not None:
                place_of[index] = place
            else:
                num_dropped += is_new
        for index in delivery.ends:
            if place_of.get(index, ROOT - 1) >= ROOT:
                self.ended.add(place_of[index])
        return InsertedNodes(num_late, num_dropped, is_full)

    def _add(self, parent: int, token_id: int, rank: int, token: BufferedToken) -> int | None:
        """Append a node; None where there is no room, or where its draws are not those that the parent has."""
        if len(self.tree) >= MAX_BUFFERED_NODES:
            return None
        siblings = self.tree.children(parent)
        if token.distribution and siblings and self.tokens[siblings[0]].distribution != token.distribution:
            return None
        if parent != ROOT:
            self.ended.discard(parent)  # what was unlikely may be likely again, deeper in the output
        self.num_bytes += token.num_bytes
        self.tokens.append(token)
        return self.tree.add(parent, token_id, rank)

    def _children(self, node: int, kind: NodeKind) -> list[int]:
        """Return the children of one kind, by rank."""
        found = [child for child in self.tree.children(node) if self.tokens[child].kind is kind]
        found.sort(key=self.tree.ranks.__getitem__)
        return found

    def advance(
        self, token_ids: Sequence[int], committed_len: int, note: Callable[[int | None], None] | None
    ) -> tuple[int, int]:
        """Go on under the tokens that a step at `committed_len` has just committed.

        Returns how many nodes are dropped, those on the path not counted, and how many of the path arrived while the
        step ran. note: called with the rank of the committed token, or None, for each node that had children.
        """
        node = ROOT
        num_before = len(self.tree)
        num_path = 0
        num_late = 0
        for token_id in token_ids:
            child = self.tree.child(node, token_id)
            if note is not None and self.tree.children(node):
                note(None if child is None else self.tree.ranks[child])
            if child is None:
                self.clear()
                break
            node = child
            num_path += 1
            token = self.tokens[node]
            num_late += token.step_len == committed_len and token.kind is not NodeKind.KEY
        else:
            kept = [node, *self.tree.reroot(node)]
            self.ended = {index for index, old in enumerate(kept, start=ROOT) if old in self.ended}
            self.tokens = [self.tokens[old] for old in kept[1:]]
            self.num_bytes = sum(token.num_bytes for token in self.tokens)
        self.num_wasted += num_late
        return num_before - len(self.tree) - num_path, num_late

    @property
    def is_ended(self) -> bool:
        """Whether nothing that is waited for will come under the committed tokens."""
        if ROOT in self.ended:
            return True
        chain = self.chain(MAX_BUFFERED_NODES)
        return bool(chain) and chain[-1] in self.ended

    def chain(self, max_len: int) -> list[int]:
        """Return the likeliest path of deterministic nodes, or the chain of sampled ones, from the root on."""
        nodes = list[int]()
        parent, kind = ROOT, NodeKind.LAW
        while len(nodes) < max_len:
            following = self._children(parent, kind)
            if following:
                parent = following[0]
                nodes.append(parent)
            elif kind is NodeKind.LAW:
                kind = NodeKind.GUESS  # after which nothing sampled follows
            else:
                break
        return nodes

    def guesses_after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids of the deterministic nodes after a path of buffered nodes, best first."""
        return [self.tree.ids[child] for child in self._children(self._find(token_ids), NodeKind.GUESS)]

    def take_cost_us(self, token_ids: Sequence[int]) -> list[int]:
        """Return what the draft worker spent on the delivery of a path's last node, in microseconds, and nothing more
        for nodes of the same delivery; no number where it does not say.
        """
        cost = self.tokens[self._find(token_ids)].cost
        if cost is None:
            return []
        us = cost.us
        cost.us = 0
        return [us]

    def _find(self, token_ids: Sequence[int]) -> int:
        node: int | None = ROOT
        for token_id in token_ids:
            node = None if node is None else self.tree.child(node, token_id)
        assert node is not None, "the path is not buffered"
        return node

    def likeliest(
        self, prob_of_rank: Callable[[int], float], kind: NodeKind, shape: TreeShape
    ) -> tuple[list[int], list[float]]:
        """Return the nodes of one kind that lie within a shape, best first, parents before their children and siblings
        by rank; and their acceptance probabilities, which follow from ranks alone.
        """
        nodes, probs = list[int](), list[float]()
        max_nodes, max_depth = shape.most_nodes, shape.depth
        # Negated probability, number of nodes taken before (of equals the first offered one is taken), parent's
        # probability, siblings, index of the one that is offered. Once it is taken, the next one and the first of its
        # own children are offered.
        heap = [(-1.0, 0, 1.0, [ROOT], 0)]
        while heap and len(nodes) <= max_nodes:
            negated, _, above, siblings, index = heapq.heappop(heap)
            nodes.append(siblings[index])
            probs.append(-negated)
            offered = [(above, siblings, index + 1)]
            depth = self.tree.depth(siblings[index])
            if depth < max_depth:
                children = self._children(siblings[index], kind)
                if shape.widths:
                    children = children[: shape.widths[depth]]
                offered.append((-negated, children, 0))
            for above, siblings, index in offered:
                if index < len(siblings):
                    prob = above * prob_of_rank(self.tree.ranks[siblings[index]])
                    heapq.heappush(heap, (-prob, len(nodes), above, siblings, index))
        return nodes[1:], probs[1:]  # without ROOT
