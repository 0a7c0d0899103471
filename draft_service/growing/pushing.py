"""Sends the nodes of a draft's trees to their targets: at once where a target has none, else now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.wire_tensors import encode_laws
from outrider.engine.speculation.growth import Growth
from outrider.engine.speculation.nodes import MAX_NODES, Delivery, NodeKind
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import OpenJob
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseRows
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

PUSH_S = 0.004
"""Seconds between two messages for a target that has draft tokens."""
NUM_URGENT = 4
"""Messages of a slot that leave at once after its target had no draft tokens."""
MAX_IN_MESSAGE = MAX_NODES // 2
"""Nodes with which a message is full; siblings of the last one are added."""

Send = Callable[[str, int, Delivery], None]
"""Sends nodes to (the target's address, its epoch). Runs on the gRPC loop's thread."""


class Pusher:
    """Decides by counts and times alone when a slot's nodes leave: under `rejection` nothing that is drawn may decide
    it.
    """

    def __init__(self, engine: EngineThread, send: Send, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._send = send
        self._metrics = metrics

    def push_due(self, growing: DraftSlot) -> None:
        """Send what was grown in a slot, if it is time."""
        tree, now = growing.tree, time.monotonic()
        if not growing.is_growing or not (tree.unsent or tree.ended):
            return
        is_drawn = not growing.slot.params.determined
        if not is_drawn:  # what is drawn leaves before anything that may take a time set by it
            is_urgent = tree.ended or growing.num_urgent > 0 or now - growing.pushed_s >= PUSH_S
            if tree.is_awaited or (not is_urgent and tree.offers(1)):
                return  # the target waits for all of it, or more will come soon
        for group in _groups(tree):
            message, laws = _message(growing, group)
            self._engine.answer(partial(self._send_encoded, growing.job, message, laws, tree.topk is not None))
        tree.unsent = []
        growing.pushed_s, growing.num_urgent = now, max(0, growing.num_urgent - 1)
        if is_drawn:
            self._engine.flush()

    def _send_encoded(self, job: OpenJob, nodes: Delivery, laws: Sequence[RowLaw], is_cut: bool) -> None:
        """Encode the laws and send. On the gRPC loop's thread."""
        encoding, num_bytes = "ids", 4 * len(nodes.ids)
        if laws:
            rows = encode_laws(laws, prefer_sparse=is_cut)
            if isinstance(rows, DenseRows):
                encoding = "full"
                num_bytes += len(rows.data)
            else:
                encoding = "topk"
                num_bytes += len(rows.ids) + len(rows.log_probs)
            nodes = replace(nodes, rows=rows, vocab_size=laws[0].vocab_size)
        self._metrics.wire_bytes.labels(encoding=encoding).inc(num_bytes)
        self._send(job.deliver_to, job.target_epoch, nodes)


def _groups(tree: Growth) -> list[list[int]]:
    """Return the unsent nodes of each message, siblings together: they share a law. The first may have none.

    Laws take up to half of what a message may be: 64 whole ones of 262,144 ids are more than that.
    """
    max_nodes = MAX_IN_MESSAGE
    law = next(iter(tree.distributions.values()), None)
    if law is not None:
        law_bytes = 4 * law.vocab_size  # a float32 of each id
        if tree.topk is not None:
            law_bytes = 8 * tree.topk  # with the ids
        max_nodes = min(max_nodes, MAX_MESSAGE_BYTES // 2 // law_bytes)
    groups = [list[int]()]
    for node in tree.unsent:
        if tree.ranks[node] == 0 and len(groups[-1]) >= max_nodes:
            groups.append([])
        groups[-1].append(node)
    return groups


def _message(growing: DraftSlot, group: Sequence[int]) -> tuple[Delivery, list[RowLaw]]:
    """Return new nodes and those that have ended, with those that lead to them; and the laws that new ones were drawn
    from. What has ended, and the time that was spent, go with the first message.
    """
    tree, draft_us = growing.tree, 0
    if group:
        draft_us, growing.spent_s = max(1, int(1e6 * growing.spent_s)), 0.0
    ended, tree.ended = tree.ended, []
    index, nodes = dict(tree.roots), set[int]()
    for node in (*group, *ended):
        while node not in index and node not in nodes:
            nodes.add(node)
            node = tree.parents[node]
    ordered = sorted(nodes)
    for place, node in enumerate(ordered):
        index[node] = place
    kinds, laws = dict.fromkeys(ordered, NodeKind.KNOWN), dict[int, RowLaw]()
    for node in group:
        kinds[node] = tree.kinds[node]
        if kinds[node] is NodeKind.LAW:
            laws.setdefault(tree.parents[node], tree.distributions[node])
    message = Delivery(
        growing.ticket,
        tree.known_len,
        [tree.ids[node] for node in ordered],
        [index[tree.parents[node]] for node in ordered],
        [tree.ranks[node] for node in ordered],
        list(kinds.values()),
        None,
        sorted({index[node] for node in ended}),
        draft_us=draft_us,
    )
    return message, list(laws.values())
