"""What leaves a draft: nodes of its trees as messages, at once where a target waits for them, else now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draft_service.draft_slot import DraftSlot
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.wire_tensors import encode_laws
from outrider.engine.speculation.growth import Growth
from outrider.engine.speculation.nodes import MAX_NODES, Delivery, NodeKind
from outrider.engine.worker.engine_thread import EngineThread
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseRows
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

PUSH_S = 0.004
"""Seconds between two messages for a target that has draft tokens to go on with."""
NUM_URGENT = 4
"""Messages of a slot that leave at once after its target had nothing to go on with."""
MAX_IN_MESSAGE = MAX_NODES // 2
"""Nodes with which a message is full; siblings of the last are added."""

Send = Callable[[str, int, Delivery], None]
"""Sends nodes to (the target's address, its epoch). Runs on the gRPC loop's thread."""


class Pusher:
    """Decides by counts and times alone when a slot's nodes leave: under `rejection` nothing that is drawn may."""

    def __init__(self, engine: EngineThread, send: Send, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._send = send
        self._metrics = metrics

    def push_due(self, growing: DraftSlot) -> None:
        """Send what was grown in a slot, if it is time."""
        tree = growing.tree
        if not growing.is_growing or not (tree.unsent or tree.ended):
            return
        now = time.monotonic()
        if not growing.slot.params.determined:
            is_due = True  # what is drawn leaves before anything that may take a time set by it
        elif tree.is_awaited:  # the target waits for all of it
            is_due = False
        elif tree.ended or growing.num_urgent > 0 or now - growing.pushed_s >= PUSH_S:  # what ends is waited for
            is_due = True
        else:  # nothing more will come soon
            is_due = not tree.offers(1)
        if is_due:
            self._push(growing, tree)
            growing.pushed_s, growing.num_urgent = now, max(0, growing.num_urgent - 1)

    def _push(self, growing: DraftSlot, tree: Growth) -> None:
        send = partial(self._send, growing.job.deliver_to, growing.job.target_epoch)
        ended, tree.ended = tree.ended, []
        for group in _groups(tree) or [()]:
            draft_us = 0
            if group:
                draft_us, growing.spent_s = max(1, int(1e6 * growing.spent_s)), 0.0
            message, laws = _message(growing.ticket, tree, group, ended, draft_us)
            self._engine.answer(partial(self._encode, send, message, laws, tree.topk is not None))
            ended = []  # it comes with the first
        tree.unsent = []
        if not growing.slot.params.determined:
            self._engine.flush()

    def _encode(self, send: Callable[[Delivery], None], nodes: Delivery, laws: Sequence[RowLaw], is_cut: bool) -> None:
        """Encode the laws and send. On the gRPC loop's thread."""
        encoding, num_bytes = "ids", 4 * len(nodes.ids)
        if laws:
            rows = encode_laws(laws, prefer_sparse=is_cut)
            if isinstance(rows, DenseRows):
                encoding, law_bytes = "full", len(rows.data)
            else:
                encoding, law_bytes = "topk", len(rows.ids) + len(rows.log_probs)
            num_bytes += law_bytes
            nodes = replace(nodes, rows=rows, vocab_size=laws[0].vocab_size)
        self._metrics.wire_bytes.labels(encoding=encoding).inc(num_bytes)
        send(nodes)


def _groups(tree: Growth) -> list[Sequence[int]]:
    """Return the unsent nodes of each message, siblings together: they share a law.

    Laws take up to half of what a message may be: 64 whole ones of 262,144 ids are more than that.
    """
    groups, group, num_bytes = list[Sequence[int]](), list[int](), 0
    for node in tree.unsent:
        law_bytes = 0
        if tree.kinds[node] is NodeKind.LAW and tree.ranks[node] == 0:
            law_bytes = 4 * tree.distributions[node].vocab_size if tree.topk is None else 8 * tree.topk
        is_full = len(group) >= MAX_IN_MESSAGE or num_bytes + law_bytes > MAX_MESSAGE_BYTES // 2
        if is_full and tree.ranks[node] == 0 and group:
            groups.append(group)
            group, num_bytes = [], 0
        group.append(node)
        num_bytes += law_bytes
    if group:
        groups.append(group)
    return groups


def _message(
    ticket: int, tree: Growth, group: Sequence[int], ended: Sequence[int], draft_us: int
) -> tuple[Delivery, list[RowLaw]]:
    """Return new nodes with those that lead to them, and the laws that new ones were drawn from."""
    index, nodes = dict(tree.roots), set[int]()
    for node in (*group, *ended):
        while node not in index and node not in nodes:
            nodes.add(node)
            node = tree.parents[node]
    new, laws = set(group), dict[int, RowLaw]()
    kinds = list[NodeKind]()
    ordered = sorted(nodes)
    for place, node in enumerate(ordered):
        index[node] = place
        kinds.append(tree.kinds[node] if node in new else NodeKind.KNOWN)
        if kinds[-1] is NodeKind.LAW:
            laws.setdefault(tree.parents[node], tree.distributions[node])
    message = Delivery(
        ticket,
        tree.known_len,
        [tree.ids[node] for node in ordered],
        [index[tree.parents[node]] for node in ordered],
        [tree.ranks[node] for node in ordered],
        kinds,
        None,
        sorted({index[node] for node in ended}),
        draft_us=draft_us,
    )
    return message, list(laws.values())
