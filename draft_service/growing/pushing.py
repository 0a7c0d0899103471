"""Send the nodes of a draft's trees to their targets: at once to a target without draft tokens, else at intervals."""

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
"""Minimum time between two messages to a target that has draft tokens, in seconds."""
NUM_URGENT = 4
"""Number of a slot's messages that are sent at once after its target had no draft tokens."""
MAX_IN_MESSAGE = MAX_NODES // 2
"""Number of nodes at which a message is full; siblings of the last one are added."""

Send = Callable[[str, int, Delivery], None]
"""Sends nodes to the target at (address, epoch). Runs on the gRPC loop's thread."""


class Pusher:
    """Sender of the slots' new nodes.

    Counts and times alone decide when a slot's nodes are sent: under `rejection` no sampled value may decide it.
    """

    def __init__(self, engine: EngineThread, send: Send, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._send = send
        self._metrics = metrics

    def push_due(self, growing: DraftSlot) -> None:
        """Send the new nodes of a slot if they are due."""
        tree, now = growing.tree, time.monotonic()
        if not growing.is_growing or not (tree.unsent or tree.ended):
            return
        is_drawn = not growing.slot.params.determined
        if not is_drawn:  # sampled tokens are sent before anything whose time depends on them
            is_urgent = tree.ended or growing.num_urgent > 0 or now - growing.pushed_s >= PUSH_S
            if tree.is_awaited or (not is_urgent and tree.offers(1)):
                return  # the target waits for the whole tree, or more nodes will come soon
        for group in _groups(tree):
            message, laws = _message(growing, group)
            self._engine.answer(partial(self._send_encoded, growing.job, message, laws, tree.topk is not None))
        tree.unsent = []
        growing.pushed_s, growing.num_urgent = now, max(0, growing.num_urgent - 1)
        if is_drawn:
            self._engine.flush()

    def _send_encoded(self, job: OpenJob, nodes: Delivery, laws: Sequence[RowLaw], is_cut: bool) -> None:
        """Runs on the gRPC loop's thread."""
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
    """Return the unsent nodes of each message, siblings together: they share a distribution. The first may be empty.

    Distributions take up to half of a message's maximum size: 64 whole ones of 262,144 ids are more than that.
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
    """Return a delivery of new and ended nodes with their ancestors, and the distributions of the new sampled ones.

    The ended nodes and the drafting time go with the first message.
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
