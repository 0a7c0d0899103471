"""The draft buffer: draft tokens received for one slot under one ticket and not yet verified. No tensors.

It mirrors the draft worker's tree under the committed tokens. A delivery names the position of its root, so it can be
inserted whatever the target has committed meanwhile. A node that is already among the committed tokens is late, and
counts as wasted. A node that contradicts them, or whose parent is missing, is dropped. All others stay until the target
commits tokens off their path. If a node is delivered twice, the first delivery counts: under `rejection` a node has one
set of draws. Runs on the engine thread.
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
"""Bytes that the maximum size of draft buffers allows for one draft token, without its distribution: enough for a
delivery of this token alone, with 60 bytes for ticket, epoch and position, and 10 for each of 19 nodes on the path to
it."""


def buffer_bytes(num_slots: int, vocab_size: int, memory_bytes: int) -> int:
    """Return the maximum number of bytes of the draft buffers of all slots together: room for MAX_DRAFT_TOKENS draft
    tokens per slot, each with a distribution of 4 bytes per id of the vocabulary.

    memory_bytes: the distributions count with at most this many bytes together.
    """
    num_tokens = num_slots * MAX_DRAFT_TOKENS
    return num_tokens * NODE_BYTES + min(num_tokens * 4 * vocab_size, memory_bytes)


@dataclass(slots=True)
class DeliveryCost:
    """Time that a draft worker spent on one delivery. The nodes of the delivery share this object."""

    us: int
    """Microseconds that the draft worker spent; 0 once `pop_cost_us` has returned them."""


@dataclass(slots=True)
class BufferedToken:
    """Data of one draft token in a draft buffer, besides the id, parent and rank, which are in the buffer's tree."""

    kind: NodeKind
    num_bytes: int
    """Bytes of the token's delivery, divided by the number of new tokens in it."""
    distribution: EncodedDistribution | None
    """Distribution that a sampled token was drawn from; None for other kinds."""
    step_len: int | None
    """If the token arrived while a step ran: the number of committed tokens at which that step began. Else None."""
    cost: DeliveryCost | None
    """Time that the draft worker spent on the token's delivery; None if the delivery does not state it."""


class DraftBuffer:
    """Draft buffer of one ticket: a tree of draft tokens, and for node i of the tree the entry `tokens[i]`."""

    def __init__(self) -> None:
        self.num_wasted = 0
        """Number of draft tokens, since the last verdict, that equal committed ones but arrived too late to be
        verified."""
        self.clear()

    def clear(self) -> None:
        """Drop all nodes."""
        self.tree = DraftTree()
        self.tokens: list[BufferedToken] = []
        self.num_bytes = 0
        self.ended: set[int] = set()
        """Nodes (or ROOT) after which the draft worker sends no more draft tokens for now, so no step waits for any."""

    def insert(
        self, delivery: Delivery, committed: Sequence[int], max_bytes: int, *, in_step: bool = False
    ) -> InsertedNodes:
        """Insert a delivery, and return how many of its nodes were late or dropped.

        committed: the slot's committed tokens. max_bytes: maximum size of the buffer. in_step: whether a step is
        running; that step does not verify these nodes.

        Example: committed tokens [a, b, c, d, e], and a delivery of d, e, f that follows the first 3 of them (root_len
        3). The nodes d and e are late, and f becomes node 0.
        """
        num_new = sum(kind is not NodeKind.REFERENCE for kind in delivery.kinds)
        node_bytes = -(-delivery.num_bytes // max(1, num_new))  # rounded up
        cost = None
        if delivery.draft_us:
            cost = DeliveryCost(delivery.draft_us)
        step_len = None
        if in_step:
            step_len = len(committed)
        distributions = dict[int, EncodedDistribution]()
        """Distribution of the sampled children of a node, by the node's index in the delivery."""
        node_of = dict[int, int]()
        """Index of the delivery's nodes in the buffer's tree, by their index in the delivery. The key ROOT is the token
        that the delivery follows; the value ROOT is the last committed token, and ROOT - n the n-th before it."""
        if delivery.root_len <= len(committed):
            node_of[ROOT] = ROOT + delivery.root_len - len(committed)
        num_late = 0
        num_dropped = 0
        is_full = False
        for index, (token_id, parent_index, kind) in enumerate(
            zip(delivery.ids, delivery.parents, delivery.kinds, strict=True)
        ):
            is_new = kind is not NodeKind.REFERENCE
            distribution = None
            if kind is NodeKind.SAMPLED:
                assert delivery.rows is not None, "sampled nodes without distributions"
                distribution = distributions.setdefault(parent_index, (delivery.rows, len(distributions)))
            parent = node_of.get(parent_index)
            node: int | None = None
            if parent is not None and parent < ROOT:  # a committed token before the last
                if token_id == committed[parent + 1]:
                    node = parent + 1
                    num_late += kind in (NodeKind.DETERMINISTIC, NodeKind.SAMPLED)
            elif parent is not None:
                node = self.tree.child(parent, token_id)
                if node is None and is_new and self.num_bytes + node_bytes > max_bytes:
                    is_full = True
                    self.ended.add(parent)  # the draft worker takes the node for delivered: no step is to wait for it
                elif node is None and is_new:
                    token = BufferedToken(kind, node_bytes, distribution, step_len, cost)
                    node = self._add(parent, token_id, delivery.ranks[index], token)
            if node is not None:
                node_of[index] = node
            else:
                num_dropped += is_new
        for index in delivery.ends:
            if node_of.get(index, ROOT - 1) >= ROOT:
                self.ended.add(node_of[index])
        return InsertedNodes(num_late, num_dropped, is_full)

    def _add(self, parent: int, token_id: int, rank: int, token: BufferedToken) -> int | None:
        if len(self.tree) >= MAX_BUFFERED_NODES:
            return None
        siblings = self.tree.children(parent)
        if token.distribution and siblings and self.tokens[siblings[0]].distribution != token.distribution:
            return None  # the parent has other draws already
        if parent != ROOT:
            self.ended.discard(parent)  # what was unlikely may be likely again, deeper in the output
        self.num_bytes += token.num_bytes
        self.tokens.append(token)
        return self.tree.add(parent, token_id, rank)

    def _children(self, node: int, kind: NodeKind) -> list[int]:
        children = [child for child in self.tree.children(node) if self.tokens[child].kind is kind]
        children.sort(key=self.tree.ranks.__getitem__)
        return children

    def advance(
        self, token_ids: Sequence[int], committed_len: int, note: Callable[[int | None], None] | None
    ) -> tuple[int, int]:
        """Move the root of the tree along the tokens that a step has just committed, and drop all nodes that do not
        follow them.

        committed_len: committed length before the step. note: called for each node on the path that had children, with
        the rank of the child that was committed, or None if no child was.

        Returns (number of dropped nodes, without those on the path itself; number of draft tokens on the path that
        arrived while the step ran, too late to be verified in it).

        Example: nodes a and b under the root, c under a; committed [a]: b is dropped, and c becomes a child of the
        root.
        """
        node = ROOT
        num_before = len(self.tree)
        num_path = 0
        num_late = 0
        for token_id in token_ids:
            child = self.tree.child(node, token_id)
            if note is not None and self.tree.children(node):
                rank = None
                if child is not None:
                    rank = self.tree.ranks[child]
                note(rank)
            if child is None:
                self.clear()
                break
            node = child
            num_path += 1
            token = self.tokens[node]
            num_late += token.step_len == committed_len and token.kind is not NodeKind.RECOVERY
        else:
            kept = [node, *self.tree.reroot(node)]  # by new index from ROOT on, the old one
            ended = set[int]()
            for new, old in enumerate(kept, start=ROOT):
                if old in self.ended:
                    ended.add(new)
            self.ended = ended
            self.tokens = [self.tokens[old] for old in kept[1:]]
            self.num_bytes = sum(token.num_bytes for token in self.tokens)
        self.num_wasted += num_late
        return num_before - len(self.tree) - num_path, num_late

    @property
    def is_ended(self) -> bool:
        """Whether the draft worker sends no more draft tokens for now after the last committed token, or after the end
        of the likeliest path in the buffer. No step then waits for any.
        """
        if ROOT in self.ended:
            return True
        chain = self.chain(MAX_BUFFERED_NODES)
        return bool(chain) and chain[-1] in self.ended

    def chain(self, max_len: int) -> list[int]:
        """Return at most max_len nodes of the likeliest path from the root. The path begins with sampled nodes, and may
        go on with deterministic ones.
        """
        nodes = list[int]()
        parent = ROOT
        kind = NodeKind.SAMPLED
        while len(nodes) < max_len:
            children = self._children(parent, kind)
            if children:
                parent = children[0]
                nodes.append(parent)
            elif kind is NodeKind.SAMPLED:
                kind = NodeKind.DETERMINISTIC  # no sampled node follows a deterministic one
            else:
                break
        return nodes

    def deterministic_ids_after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids of the deterministic draft tokens that are children of a buffered node, best first.

        token_ids: the path from the root to that node.
        """
        return [self.tree.ids[child] for child in self._children(self._find(token_ids), NodeKind.DETERMINISTIC)]

    def pop_cost_us(self, token_ids: Sequence[int]) -> list[int]:
        """Return [microseconds that the draft worker spent on the delivery of a buffered node]; [] if unknown.

        Each delivery's time is returned once: a later call for a node of the same delivery returns [0]. token_ids: the
        path from the root to the node.
        """
        cost = self.tokens[self._find(token_ids)].cost
        if cost is None:
            return []
        us = cost.us
        cost.us = 0
        return [us]

    def _find(self, token_ids: Sequence[int]) -> int:
        node = ROOT
        for token_id in token_ids:
            child = self.tree.child(node, token_id)
            assert child is not None, "the path is not buffered"
            node = child
        return node

    def likeliest(
        self, prob_of_rank: Callable[[int], float], kind: NodeKind, shape: TreeShape
    ) -> tuple[list[int], list[float]]:
        """Return the nodes of one kind that lie within a tree shape, best first, and their acceptance probabilities.

        prob_of_rank: function that returns a node's acceptance probability by its rank among its siblings. kind:
        sampled or deterministic. shape: maximum size of the tree. Parents come before their children, and siblings in
        the order of their ranks. Probabilities depend on ranks alone, never on tokens.

        Example: ranks 0 and 1 have probability 0.6 and 0.3; a and b are under the root, c is under a; the shape has 2
        nodes. The result is a (0.6) and c (0.36), which comes before b (0.3).
        """
        nodes = list[int]()
        probs = list[float]()
        max_nodes = shape.max_nodes
        max_depth = shape.depth
        # Negated probability, number of nodes taken before (of equals the first offered one is taken), the parent's
        # probability, siblings, index of the offered one among them. Once that is taken, the next sibling and the first
        # of its own children are offered.
        heap = [(-1.0, 0, 1.0, [ROOT], 0)]
        while heap and len(nodes) <= max_nodes:
            negated_prob, _, parent_prob, siblings, index = heapq.heappop(heap)
            nodes.append(siblings[index])
            probs.append(-negated_prob)
            offered = [(parent_prob, siblings, index + 1)]
            depth = self.tree.depth(siblings[index])
            if depth < max_depth:
                children = self._children(siblings[index], kind)
                if shape.widths:
                    children = children[: shape.widths[depth]]
                offered.append((-negated_prob, children, 0))
            for parent_prob, siblings, index in offered:
                if index < len(siblings):
                    prob = parent_prob * prob_of_rank(self.tree.ranks[siblings[index]])
                    heapq.heappush(heap, (-prob, len(nodes), parent_prob, siblings, index))
        return nodes[1:], probs[1:]  # without ROOT
