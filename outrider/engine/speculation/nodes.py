"""Deliveries: nodes of a draft worker's tree on their way to a target, as plain values. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from outrider.engine.speculation.draft_tree import ROOT
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import MAX_CHOICES
from outrider.wire.transport.codec import BadTensor, Rows, rows_from_proto, rows_to_proto

MAX_NODES = 256
"""Most nodes of one delivery."""
MAX_BUFFERED_NODES = 1024
"""Nodes of one slot that are buffered in a target. It bounds what a draft worker that never stops may fill."""


class NodeKind(Enum):
    """Kind of a node of a draft worker's tree."""

    GUESS = tpb.NODE_KIND_GUESS
    """Deterministic."""
    LAW = tpb.NODE_KIND_LAW
    """Sampled from a distribution that is delivered with it."""
    KEY = tpb.NODE_KIND_KEY
    """Stands for a token that the target may draw itself: never verified, but followed by what may be."""
    KNOWN = tpb.NODE_KIND_KNOWN
    """On the path to others, and delivered before: a target without it drops what is below it."""


_KINDS = {kind.value: kind for kind in NodeKind}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Nodes that follow the committed tokens [0, root_len). All lists but the last two are as long as ids."""

    ticket: int
    root_len: int
    ids: Sequence[int]
    parents: Sequence[int]
    """Index of each node's parent, which comes before it, or ROOT; ROOT - b for live beam b of a search."""
    ranks: Sequence[int]
    """Order of each node among its siblings, the likeliest or first sampled one 0."""
    kinds: Sequence[NodeKind]
    rows: Rows | None
    """Distributions: one for each parent of LAW nodes, in the order of their first LAW children."""
    ends: Sequence[int] = ()
    """Indices of nodes, or ROOT, that nothing will follow which is waited for."""
    num_bytes: int = 0
    vocab_size: int = 0
    """Ids of a whole distribution, where it has some and is to be sent."""
    draft_us: int = 0
    """Time that the draft worker spent on them, in microseconds; 0 = not known."""


@dataclass(frozen=True, slots=True)
class InsertedNodes:
    """Fates of a delivery's nodes."""

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
    ids = _ints("ids", item.ids, MAX_NODES, range(vocab_size))
    num = len(ids)
    parents = _ints("parents", item.parents, MAX_NODES, range(ROOT - MAX_CHOICES + 1, MAX_NODES))
    for name, values in (("parents", parents), ("ranks", item.ranks), ("kinds", item.kinds)):
        if len(values) != num:
            raise BadTensor(f"{len(values)} {name} for {num} nodes; each node has one")
    kinds, sampled_parents = list[NodeKind](), set[int]()
    for node, (parent, number) in enumerate(zip(parents, item.kinds, strict=True)):
        if parent >= node:
            raise BadTensor(f"parent of node {node} is {parent}, must come before it")
        kind = _KINDS.get(number)
        if kind is None:
            raise BadTensor(f"kinds hold {number}, must be of {sorted(_KINDS)}")
        if kind is NodeKind.LAW:
            sampled_parents.add(parent)
        kinds.append(kind)
    rows = None
    if sampled_parents:
        if not item.HasField("distributions"):
            raise BadTensor("distributions are missing, and nodes were drawn from laws")
        rows = rows_from_proto(item.distributions, len(sampled_parents), vocab_size)
    return Delivery(
        item.ticket,
        item.root_len,
        ids,
        parents,
        list(item.ranks),
        kinds,
        rows,
        _ints("ends", item.ends, num + 1, range(ROOT, num)),
        item.ByteSize(),
        draft_us=item.draft_us,
    )


def _ints(name: str, data: bytes, max_num: int, allowed: range) -> list[int]:
    """Read int32s, at most max_num, all of them allowed. Raises BadTensor."""
    if len(data) % 4:
        raise BadTensor(f"{name} has {len(data)} bytes, not a multiple of 4")
    values: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    if len(values) > max_num:
        raise BadTensor(f"{name} has {len(values)} entries, at most {max_num} are allowed")
    for value in values:
        if value not in allowed:
            raise BadTensor(f"{name} hold {value}, outside {allowed.start} to {allowed.stop - 1}")
    return values
