"""What leaves a draft: nodes of its trees as messages, at once where a target waits for them, else now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from draft_service.growing import Growing
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.wire_tensors import encode_laws
from outrider.engine.speculation.growing_beams import GrowingBeams
from outrider.engine.speculation.nodes import MAX_NODES, TREE_ROOT, NodeKind, Nodes
from outrider.engine.speculation.tree import GrowingTree, Node
from outrider.engine.worker.engine_thread import EngineThread
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseRows
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

PUSH_S = 0.004
"""Seconds between two messages of guesses for a target that has some to go on with. Doubling it halves the messages,
and lets guesses come later."""
NUM_URGENT = 4
"""Messages of a slot that leave at once after its target had nothing to go on with. Doubling it lets a target that
waits go on with all that is grown, for more messages."""
MOST_IN_MESSAGE = MAX_NODES // 2
"""Nodes with which a message is full; siblings of the last are added. Doubling it makes a target refuse the largest."""

Send = Callable[[str, int, Nodes], None]
"""Sends nodes to (the target's address, its epoch). Runs on the gRPC loop's thread."""


class Pusher:
    """Decides by counts and times alone when a slot's nodes leave: under `rejection` nothing that is drawn may."""

    def __init__(self, engine: EngineThread, send: Send, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._send = send
        self._metrics = metrics

    def push_due(self, growing: Growing, *, goes_on: bool) -> None:
        """Send what was grown in a slot, if it is time. goes_on: more is being grown now."""
        tree = growing.tree
        if tree is None or not (tree.unsent or tree.ended):
            return
        now = time.monotonic()
        if not growing.slot.params.determined:
            is_due = True  # what is drawn leaves before anything that may take a time set by it
        elif tree.awaits_named:  # the target waits for all of it
            is_due = False
        else:  # what ends is waited for
            is_due = bool(tree.ended) or not goes_on or growing.num_urgent > 0 or now - growing.pushed_s >= PUSH_S
        if is_due:
            self._push(growing, tree)
            growing.pushed_s, growing.num_urgent = now, max(0, growing.num_urgent - 1)

    def _push(self, growing: Growing, tree: GrowingTree | GrowingBeams) -> None:
        unsent, tree.unsent = tree.unsent, []
        ended, tree.ended = tree.ended, []
        send = partial(self._send, growing.job.deliver_to, growing.job.target_epoch)
        for group in _groups(unsent):
            message, laws, is_cut = _message(growing.ticket, tree, group, ended)
            told = replace(message, draft_us=max(1, int(1e6 * growing.spent_s)))
            self._engine.answer(partial(self._encode, send, told, laws, is_cut))
            growing.spent_s, ended = 0.0, []
        if ended:
            self._engine.answer(partial(self._encode, send, *_message(growing.ticket, tree, (), ended)))
        if not growing.slot.params.determined:
            self._engine.flush()

    def _encode(self, send: Callable[[Nodes], None], nodes: Nodes, laws: Sequence[RowLaw], is_cut: bool) -> None:
        """Encode the laws and send. On the gRPC loop's thread."""
        encoding, num_bytes = "ids", 4 * len(nodes.ids)
        if laws:
            rows = encode_laws(laws, prefer_sparse=is_cut)
            is_full = isinstance(rows, DenseRows)
            encoding = "full" if is_full else "topk"
            num_bytes += len(rows.data) if isinstance(rows, DenseRows) else len(rows.ids) + len(rows.log_probs)
            nodes = nodes.with_rows(rows, laws[0].vocab_size)
        self._metrics.wire_bytes.labels(encoding=encoding).inc(num_bytes)
        send(nodes)


def _groups(unsent: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """Return the nodes of each message, siblings together: they share a law. Those that end come with the first.

    Laws take up to half of what a message may be: 64 whole ones of 262,144 ids are more than that.
    """
    start, num_bytes = 0, 0
    for place, node in enumerate(unsent):
        law_bytes = _law_bytes(node)
        is_full = place - start >= MOST_IN_MESSAGE or num_bytes + law_bytes > MAX_MESSAGE_BYTES // 2
        if is_full and node.rank == 0 and place > start:
            yield unsent[start:place]
            start, num_bytes = place, 0
        num_bytes += law_bytes
    if start < len(unsent):
        yield unsent[start:]


def _law_bytes(node: Node) -> int:
    """Return the most bytes that a node adds to a message by its law, which its siblings share."""
    if node.kind is not NodeKind.LAW or node.law is None or node.rank:
        return 0
    topk = None if node.segment is None else node.segment.topk
    return 4 * node.law.vocab_size if topk is None else 8 * topk


def _message(
    ticket: int, tree: GrowingTree | GrowingBeams, group: Sequence[Node], ended: Sequence[Node]
) -> tuple[Nodes, list[RowLaw], bool]:
    """Return new nodes with those that lead to them, the laws of those that were drawn, and whether these were cut."""
    new = {id(node) for node in group}
    order = {id(node): node for node in group}
    live = tree.live if isinstance(tree, GrowingBeams) else [tree.root]
    roots = {id(node): TREE_ROOT - place for place, node in enumerate(live)}
    for node in (*group, *ended):
        above: Node | None = node
        while above is not None and id(above) not in roots and (id(above) not in order or above is node):
            order[id(above)] = above
            above = above.parent
    nodes = sorted(order.values(), key=lambda node: (node.position, node.rank))
    index = {id(node): place for place, node in enumerate(nodes)} | roots
    kinds = [node.kind if id(node) in new else NodeKind.KNOWN for node in nodes]
    drawn: dict[int, Node] = {}  # by parent, the first
    for node, kind in zip(nodes, kinds, strict=True):
        if kind is NodeKind.LAW:
            drawn.setdefault(id(node.parent), node)
    message = Nodes(
        ticket,
        tree.length if isinstance(tree, GrowingBeams) else tree.committed_len,
        [node.token_id for node in nodes],
        [index[id(node.parent)] for node in nodes],
        [node.rank for node in nodes],
        kinds,
        None,
        sorted({index[id(node)] for node in ended}),
    )
    is_cut = any(node.segment is not None and node.segment.topk is not None for node in drawn.values())
    return message, [node.law for node in drawn.values() if node.law is not None], is_cut
