"""Keeps what drafts delivered for one slot: a mirror of the draft's tree under the committed tokens. No tensors.

A delivery names positions and stands alone. What of it lies on the committed tokens came too late and is counted; what
disagrees with them, or hangs under a path that is not here, is dropped; the rest is kept until the target has gone
another way. What came first stays: under `rejection` a state has one chain, whoever delivers it twice. On the engine
thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider.engine.speculation.nodes import TREE_ROOT, NodeKind, Nodes
from outrider.wire.params import MAX_DRAFT_TOKENS
from outrider.wire.transport.codec import Rows
from outrider.wire.tree_shape import TreeShape

MAX_PARKED_NODES = 1024
"""Nodes of one slot; what comes beyond is dropped. Doubling it doubles what a draft that never stops may fill."""


NODE_BYTES = 256
"""Bytes of a delivery of one token without its law: 60 of ticket, epoch and place, and 10 a token for the way to it."""


def parked_bytes(num_slots: int, vocab_size: int, memory_bytes: int) -> int:
    """Return the bytes that what drafts delivered may take, for all slots.

    A slot can verify MAX_DRAFT_TOKENS tokens, and the heaviest comes with the log-probs of the whole vocabulary,
    4 bytes an id. All slots together take at most memory_bytes, but guesses, which have no log-probs, always have room.
    """
    num_tokens = num_slots * MAX_DRAFT_TOKENS
    guesses_bytes = num_tokens * NODE_BYTES
    return guesses_bytes + min(num_tokens * 4 * vocab_size, memory_bytes)


@dataclass(slots=True)
class Spent:
    """What a draft spent on one delivery."""

    us: int
    """Microseconds; 0 once they are told."""

    def take_us(self) -> int:
        us, self.us = self.us, 0
        return us


@dataclass(slots=True)
class ParkedNode:
    """A draft token that has arrived and not been decided on."""

    token_id: int
    rank: int = 0
    kind: NodeKind = NodeKind.GUESS
    num_bytes: int = 0
    law: tuple[Rows, int] | None = None
    """What it was drawn from: a row of a delivery; None but for LAW."""
    children: dict[int, ParkedNode] = field(default_factory=dict)
    """By token id."""
    ended: bool = False
    """Nothing that is waited for will follow it."""
    missed_len: int | None = None
    """Committed tokens of the step that was running when it came."""
    spent: Spent | None = None
    """On all nodes that came with it; None where that is not known."""

    def drawn(self) -> list[ParkedNode]:
        """Return its LAW children in the order in which they were drawn."""
        drawn = [node for node in self.children.values() if node.kind is NodeKind.LAW]
        return drawn if len(drawn) < 2 else sorted(drawn, key=lambda node: node.rank)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of the nodes of a delivery."""

    num_new: int = 0
    num_late: int = 0
    """Nodes on the committed path: their step is over."""
    num_dropped: int = 0
    """Nodes that hang under no path here, or for which there is no room."""
    no_room: bool = False
    """Whether some were too many bytes."""


Here = tuple[int, ParkedNode | None]
"""Where a node of a delivery lies: the length with it, and the node here; None where it is committed, but for the last
committed token, which is the root."""


class Parked:
    """Of one slot, under one ticket."""

    def __init__(self) -> None:
        self.root = ParkedNode(TREE_ROOT)
        """Stands for the last committed token."""
        self.num_nodes = 0
        self.num_bytes = 0

    def insert(self, nodes: Nodes, committed: Sequence[int], most_bytes: int, *, in_step: bool = False) -> Inserted:
        """Take in what a draft delivered. committed: the slot's tokens; most_bytes: what the slot may hold; in_step: a
        step is running, which verifies without it.
        """
        num_committed, is_known = len(committed), [kind is NodeKind.KNOWN for kind in nodes.kinds]
        num_bytes = -(-nodes.num_bytes // max(1, is_known.count(False)))
        places: dict[int, Here | None] = {TREE_ROOT: None}
        if nodes.root_len <= num_committed:
            places[TREE_ROOT] = (nodes.root_len, self.root if nodes.root_len == num_committed else None)
        row_of, new, late, no_room = _rows_of(nodes), 0, 0, False
        spent = Spent(nodes.draft_us) if nodes.draft_us else None
        for index, (token_id, parent_index) in enumerate(zip(nodes.ids, nodes.parents, strict=True)):
            place, places[index] = places.get(parent_index), None
            if place is None:
                continue
            length, parent = place
            if parent is None:  # it is committed, and so is what follows it
                if committed[length] == token_id:
                    late += nodes.kinds[index] in (NodeKind.GUESS, NodeKind.LAW)
                    places[index] = (length + 1, self.root if length + 1 == num_committed else None)
                continue
            child = parent.children.get(token_id)
            if child is None and not is_known[index] and self.num_bytes + num_bytes > most_bytes:
                no_room = parent.ended = True  # the draft believes that it is here: nobody is to wait for it
            elif child is None and not is_known[index]:
                child = self._add(parent, nodes, index, row_of.get(parent_index), num_bytes)
                if child is not None:
                    new += 1
                    child.missed_len, child.spent = num_committed if in_step else None, spent
            if child is not None:
                places[index] = (length + 1, child)
        for index in nodes.ends:
            place = places[index]
            if place is not None and place[1] is not None:
                place[1].ended = True
        num_dropped = sum(places[i] is None and not known for i, known in enumerate(is_known))
        return Inserted(new, late, num_dropped, no_room)

    def _add(self, parent: ParkedNode, nodes: Nodes, index: int, row: int | None, num_bytes: int) -> ParkedNode | None:
        """Return a new child; None where there is no room, or no use for it. row: of the parent's law."""
        if self.num_nodes >= MAX_PARKED_NODES:
            return None
        kind, law = nodes.kinds[index], None
        if kind is NodeKind.LAW:
            assert nodes.rows is not None and row is not None, "a LAW node without its law"
            law = (nodes.rows, row)
            drawn = parent.drawn()
            if (drawn and drawn[0].law != law) or (parent.children and not drawn):
                return None  # of another proposal than the first, of which a state has one
        child = ParkedNode(nodes.ids[index], nodes.ranks[index], kind, num_bytes, law)
        parent.children[child.token_id] = child
        parent.ended &= parent is self.root  # what was doubted may be believed again, deeper in the answer
        self.num_nodes += 1
        self.num_bytes += num_bytes
        return child

    def advance(
        self, ids: Sequence[int], committed_len: int, note: Callable[[int | None], None] | None
    ) -> tuple[int, int]:
        """Go on under the tokens just committed by a step behind committed_len others. Return how many nodes are given
        up, those on the path not counted, and how many of these came while it ran.

        note: is told the rank of what came, or None, for each node that had children.
        """
        node, before, num_path, num_late = self.root, self.num_nodes, 0, 0
        for token_id in ids:
            child = node.children.get(token_id)
            if note is not None and node.children:
                note(None if child is None else child.rank)
            if child is None:
                node = ParkedNode(TREE_ROOT)
                break
            node = child
            num_path += 1
            num_late += node.missed_len == committed_len and node.kind is not NodeKind.KEY
        self.root = node
        below = [each for each in _all(node) if each is not node]
        self.num_nodes, self.num_bytes = len(below), sum(each.num_bytes for each in below)
        return before - self.num_nodes - num_path, num_late

    @property
    def ended(self) -> bool:
        """Return whether nothing that is waited for will come under the committed tokens."""
        chain = self.chain(MAX_PARKED_NODES)
        return self.root.ended or (bool(chain) and chain[-1].ended)

    def clear(self) -> int:
        """Give everything up; return how many nodes that were."""
        num_nodes = self.num_nodes
        self.root, self.num_nodes, self.num_bytes = ParkedNode(TREE_ROOT), 0, 0
        return num_nodes

    def chain(self, most: int) -> list[ParkedNode]:
        """Return the likeliest path of guesses, or the chain of laws, from the last committed token on."""
        found: list[ParkedNode] = []
        node = self.root
        while len(found) < most:
            following = node.drawn() or sorted(
                (n for n in node.children.values() if n.kind is NodeKind.GUESS), key=lambda each: each.rank
            )
            if not following or (found and found[0].kind is NodeKind.GUESS and following[0].kind is not NodeKind.GUESS):
                break
            node = following[0]
            found.append(node)
        return found

    def guesses_after(self, ids: Sequence[int]) -> list[int]:
        """Return what is guessed to follow a path under the committed tokens that is here, best first."""
        node = self.root
        for token_id in ids:
            node = node.children[token_id]
        guesses = [child for child in node.children.values() if child.kind is NodeKind.GUESS]
        return [child.token_id for child in sorted(guesses, key=lambda child: child.rank)]

    def best(self, share: Callable[[int], float], most: int) -> list[tuple[float, ParkedNode, int]]:
        """Return the likeliest guesses of the tree, best first: (chance, node, index of its parent among them)."""
        return self._best(share, most, lambda node, depth: node.kind is NodeKind.GUESS)

    def within(
        self, share: Callable[[int], float], kind: NodeKind, shape: TreeShape
    ) -> list[tuple[float, ParkedNode, int]]:
        """Return the nodes of a kind that lie within a shape, parents before their children and siblings by rank."""

        def lies_within(node: ParkedNode, depth: int) -> bool:
            fits = depth <= shape.depth and (not shape.widths or node.rank < shape.widths[depth - 1])
            return fits and node.kind is kind

        return self._best(share, shape.most_nodes, lies_within)

    def _best(
        self, share: Callable[[int], float], most: int, takes: Callable[[ParkedNode, int], bool]
    ) -> list[tuple[float, ParkedNode, int]]:
        found: list[tuple[float, ParkedNode, int]] = []
        order = count()
        heap: list[tuple[float, int, list[ParkedNode], float, int, int]] = []

        def offer(siblings: list[ParkedNode], parent_chance: float, depth: int, at: int) -> None:
            """Offer the first of siblings; the next follows when it is taken, for they stand in the order of draws."""
            if siblings:
                chance = parent_chance * share(siblings[0].rank)
                heapq.heappush(heap, (-chance, next(order), siblings, parent_chance, depth, at))

        def following(parent: ParkedNode, depth: int) -> list[ParkedNode]:
            taken = [node for node in parent.children.values() if takes(node, depth)]
            return sorted(taken, key=lambda node: node.rank)

        offer(following(self.root, 1), 1.0, 1, TREE_ROOT)
        while heap and len(found) < most:
            chance, _, (node, *rest), parent_chance, depth, at = heapq.heappop(heap)
            found.append((-chance, node, at))
            offer(rest, parent_chance, depth, at)
            offer(following(node, depth + 1), -chance, depth + 1, len(found) - 1)
        return found


def _rows_of(nodes: Nodes) -> dict[int, int]:
    """Return, by the index of a parent of LAW nodes, its row among the laws."""
    rows: dict[int, int] = {}
    for parent, kind in zip(nodes.parents, nodes.kinds, strict=True):
        if kind is NodeKind.LAW:
            rows.setdefault(parent, len(rows))
    return rows


def _all(node: ParkedNode) -> Iterator[ParkedNode]:
    yield node
    for child in node.children.values():
        yield from _all(child)
