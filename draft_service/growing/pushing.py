"""Send the nodes of a draft worker's trees to the targets: at once to a target without draft tokens, else at
intervals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.sampling.wire_tensors import encode_distributions
from outrider.engine.speculation.growth import Growth
from outrider.engine.speculation.nodes import MAX_NODES, Delivery, NodeKind
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import OpenJob
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseDistributions
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

PUSH_S = 0.004
"""Minimum seconds between two messages of deterministic draft tokens for one slot, while the slot's target still has
some of its draft tokens."""
NUM_URGENT = 4
"""Number of messages for a slot that are sent at once, without waiting `PUSH_S`, after the target has run out of draft
tokens for the slot."""
MAX_IN_MESSAGE = MAX_NODES // 2
"""Number of nodes at which a message is full. Siblings of its last node are still added, since siblings share a
distribution, which is sent once."""

Send = Callable[[str, int, Delivery], None]
"""Function that sends a delivery. Arguments: the target's address, its epoch, and the delivery. Runs on the gRPC loop's
thread."""


class NodeSender:
    """Sends new nodes of the slots' trees to their targets.

    Sampled nodes are sent at once. If the time of sending depended on which tokens were sampled, so would which of them
    arrive in time to be verified, and the output would no longer have the target's distribution.
    """

    def __init__(self, engine: EngineThread, send: Send, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._send = send
        self._metrics = metrics

    def push_due(self, draft_slot: DraftSlot) -> None:
        """Send the new nodes of a slot if they are due.

        Sampled nodes are due at once. Deterministic nodes are due if the target has run out of draft tokens for the
        slot, if a branch has ended, if no more nodes will grow, or `PUSH_S` seconds after the last message. If the
        request fixes their number or the shape of the tree, no deterministic node is due before all have grown.
        """
        tree = draft_slot.tree
        now = time.monotonic()
        if not draft_slot.is_growing or not (tree.unsent or tree.ended):
            return
        is_sampled = not draft_slot.slot.params.is_deterministic
        if not is_sampled:  # sampled tokens are sent before anything whose time depends on them
            is_urgent = tree.ended or draft_slot.num_urgent > 0 or now - draft_slot.sent_s >= PUSH_S
            if tree.is_awaited or (not is_urgent and tree.candidates(1)):
                return  # the target waits for the whole tree, or more nodes will come soon
        for group in _groups(tree):
            message, distributions = _message(draft_slot, group)
            self._engine.answer(
                partial(self._send_encoded, draft_slot.job, message, distributions, tree.topk is not None)
            )
        tree.unsent = []
        draft_slot.sent_s = now
        draft_slot.num_urgent = max(0, draft_slot.num_urgent - 1)
        if is_sampled:
            self._engine.flush()

    def _send_encoded(
        self, job: OpenJob, nodes: Delivery, distributions: Sequence[TokenDistribution], is_cut: bool
    ) -> None:
        # Runs on the gRPC loop's thread, so that encoding takes no time of the engine's.
        encoding = "ids"
        num_bytes = 4 * len(nodes.ids)
        if distributions:
            rows = encode_distributions(distributions, prefer_sparse=is_cut)
            if isinstance(rows, DenseDistributions):
                encoding = "full"
                num_bytes += len(rows.data)
            else:
                encoding = "topk"
                num_bytes += len(rows.ids) + len(rows.log_probs)
            nodes = replace(nodes, rows=rows, vocab_size=distributions[0].vocab_size)
        self._metrics.wire_bytes.labels(encoding=encoding).inc(num_bytes)
        self._send(job.target_address, job.target_epoch, nodes)


def _groups(tree: Growth) -> list[list[int]]:
    """Split the unsent nodes into messages, siblings together, since they share a distribution. The first message may
    be empty.

    Distributions take up to half of a message's maximum size: 64 whole ones of 262,144 ids are more than that.

        # at most 2 nodes a message, unsent [0, 1, 2, 3] of parents [ROOT, 0, 0, 1]: [[0, 1, 2], [3]], 1 and 2 are
        siblings
    """
    max_nodes = MAX_IN_MESSAGE
    distribution = next(iter(tree.distributions.values()), None)
    if distribution is not None:
        distribution_bytes = 4 * distribution.vocab_size  # a float32 of each id
        if tree.topk is not None:
            distribution_bytes = 8 * tree.topk  # with the ids
        max_nodes = min(max_nodes, MAX_MESSAGE_BYTES // 2 // distribution_bytes)
    groups = [list[int]()]
    for node in tree.unsent:
        if tree.ranks[node] == 0 and len(groups[-1]) >= max_nodes:
            groups.append([])
        groups[-1].append(node)
    return groups


def _message(draft_slot: DraftSlot, group: Sequence[int]) -> tuple[Delivery, list[TokenDistribution]]:
    """Return a delivery of new and ended nodes with their ancestors, and the distributions of the new sampled ones.

    The ended nodes and the drafting time go with the first message. Ancestors are sent as reference nodes, since the
    message that delivered them may have been lost.

        # parents [ROOT, ROOT, 0, 2], new node 3: the message holds nodes 0, 2 and 3 with parents [ROOT, 0, 1]
    """
    tree = draft_slot.tree
    draft_us = 0
    if group:
        draft_us = max(1, int(1e6 * draft_slot.spent_s))
        draft_slot.spent_s = 0.0
    ended = tree.ended
    tree.ended = []

    index = dict(tree.roots)  # by node: its index in the message
    nodes = set[int]()
    for node in (*group, *ended):
        while node not in index and node not in nodes:
            nodes.add(node)
            node = tree.parents[node]
    ordered = sorted(nodes)
    for position, node in enumerate(ordered):
        index[node] = position

    kinds = dict.fromkeys(ordered, NodeKind.REFERENCE)
    distributions = dict[int, TokenDistribution]()  # by parent, since siblings share one
    for node in group:
        kinds[node] = tree.kinds[node]
        if kinds[node] is NodeKind.SAMPLED:
            distributions.setdefault(tree.parents[node], tree.distributions[node])

    ids = list[int]()
    parents = list[int]()
    ranks = list[int]()
    for node in ordered:
        ids.append(tree.ids[node])
        parents.append(index[tree.parents[node]])
        ranks.append(tree.ranks[node])
    message = Delivery(
        draft_slot.ticket,
        tree.known_len,
        ids,
        parents,
        ranks,
        list(kinds.values()),
        None,
        sorted({index[node] for node in ended}),
        draft_us=draft_us,
    )
    return message, list(distributions.values())
