"""Deliveries: nodes of a draft's tree on their way to a target, as plain values. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import MAX_CHOICES
from outrider.wire.transport.codec import BadTensor, Rows, rows_from_proto, rows_to_proto

MAX_NODES = 256
"""Most nodes of one delivery."""
MAX_BUFFERED_NODES = 1024
"""Nodes of one slot that are buffered in a target. It bounds what a draft worker that never stops may fill."""
TREE_ROOT = -1
"""Stands for the last token before root_len, where a node's parent is asked for."""


class NodeKind(Enum):
    """What a node of a draft's tree is."""

    GUESS = tpb.NODE_KIND_GUESS
    """A guess of what the target says."""
    LAW = tpb.NODE_KIND_LAW
    """Drawn from a law that is delivered with it."""
    KEY = tpb.NODE_KIND_KEY
    """A guess of what the target will draw itself: never verified, but followed by what may be."""
    KNOWN = tpb.NODE_KIND_KNOWN
    """On the way to others, and delivered before: where it is not here, neither is what hangs below it."""


_KINDS = {kind.value: kind for kind in NodeKind}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Nodes that follow the committed tokens [0, root_len). All lists but the last two are as long as ids."""

    ticket: int
    root_len: int
    ids: Sequence[int]
    parents: Sequence[int]
    """Index of each node's parent, which comes before it, or TREE_ROOT; TREE_ROOT - b for live beam b of a search."""
    ranks: Sequence[int]
    """Place among its siblings, the most likely or first drawn one 0."""
    kinds: Sequence[NodeKind]
    rows: Rows | None
    """Laws: one for each parent of LAW nodes, in the order of their first LAW children."""
    ends: Sequence[int] = ()
    """Indices of nodes, or TREE_ROOT, that nothing will follow which is waited for."""
    num_bytes: int = 0
    vocab_size: int = 0
    """Ids of a whole law, where it has laws and is to be sent."""
    draft_us: int = 0
    """What the draft spent on them, in microseconds; 0 = not known."""


@dataclass(frozen=True, slots=True)
class InsertedNodes:
    """What became of the nodes of a delivery."""

    num_late: int = 0
    """Nodes on the committed tokens: their step is over."""
    num_dropped: int = 0
    """Nodes without a parent here, or without room."""
    is_full: bool = False
    """Some were too many bytes."""


def to_proto(delivery: Delivery, target_epoch: int) -> tpb.Delivery:
    return tpb.Delivery(
        ticket=delivery.ticket,
        target_epoch=target_epoch,
        root_len=delivery.root_len,
        ids=np.array(delivery.ids, dtype="<i4").tobytes(),
        parents=np.array(delivery.parents, dtype="<i4").tobytes(),
        ranks=bytes(delivery.ranks),
        kinds=bytes(kind.value for kind in delivery.kinds),
        distributions=None if delivery.rows is None else rows_to_proto(delivery.rows, delivery.vocab_size),
        ends=np.array(delivery.ends, dtype="<i4").tobytes(),
        draft_us=delivery.draft_us,
    )


def from_proto(item: tpb.Delivery, vocab_size: int) -> Delivery:
    """Read and check all that needs no tensor of floats. Raises BadTensor."""
    ids = _ids(item.ids, vocab_size)
    num = len(ids)
    parents = _ints("parents", item.parents)
    ranks, kinds = list(item.ranks), list(item.kinds)
    for name, values in (("parents", parents), ("ranks", ranks), ("kinds", kinds)):
        if len(values) != num:
            raise BadTensor(f"{len(values)} {name} for {num} nodes; each node has one")
    for node, parent in enumerate(parents):
        if not TREE_ROOT - MAX_CHOICES < parent < node:
            least = TREE_ROOT - MAX_CHOICES + 1
            raise BadTensor(f"parent of node {node} is {parent}, must be from {least} to {node - 1}")
    unknown = set(kinds) - _KINDS.keys()
    if unknown:
        raise BadTensor(f"kinds hold {min(unknown)}, must be of {sorted(_KINDS)}")
    ends = _ints("ends", item.ends)
    if len(ends) > num + 1 or not all(TREE_ROOT <= node < num for node in ends):
        raise BadTensor(f"ends has {len(ends)} entries, up to {max(ends)}; each names one of {num} nodes or the root")
    drawn_from = {parent for parent, kind in zip(parents, kinds, strict=True) if kind == tpb.NODE_KIND_LAW}
    if drawn_from and not item.HasField("distributions"):
        raise BadTensor("distributions are missing, and nodes were drawn from laws")
    rows = rows_from_proto(item.distributions, len(drawn_from), vocab_size) if drawn_from else None
    return Delivery(
        item.ticket,
        item.root_len,
        ids,
        parents,
        ranks,
        [_KINDS[kind] for kind in kinds],
        rows,
        ends,
        item.ByteSize(),
        draft_us=item.draft_us,
    )


def _ints(name: str, data: bytes) -> list[int]:
    if len(data) % 4:
        raise BadTensor(f"{name} has {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<i4").tolist()  # type: ignore[no-any-return]


def _ids(data: bytes, vocab_size: int) -> list[int]:
    if len(data) > 4 * MAX_NODES:
        raise BadTensor(f"ids has {len(data) // 4} tokens, at most {MAX_NODES} are allowed")
    ids = _ints("ids", data)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadTensor(f"ids hold {token_id}, outside 0 to {vocab_size - 1}")
    return ids
