"""Nodes of a draft's tree on their way to a target, as plain values. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.codec import BadTensor, Rows, rows_from_proto, rows_to_proto

MAX_NODES = 256
"""Most nodes of one delivery, and tokens of its path. Doubling it doubles what one message may hold up."""
PATH_END = -1
"""Stands for the end of the path, where a node's parent is asked for."""


class NodeKind(Enum):
    """What a node of a draft's tree is."""

    GUESS = tpb.NODE_KIND_GUESS
    """A guess of what the target says."""
    LAW = tpb.NODE_KIND_LAW
    """Drawn from a law that is delivered with it."""
    KEY = tpb.NODE_KIND_KEY
    """A guess of what the target will draw itself: never verified, but followed by what may be."""


_KINDS = {kind.value: kind for kind in NodeKind}


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes that hang under committed tokens [0, root_len) followed by `path`. All lists are as long as ids."""

    ticket: int
    root_len: int
    path: Sequence[int]
    ids: Sequence[int]
    parents: Sequence[int]
    """Index of each node's parent, which comes before it, or PATH_END."""
    ranks: Sequence[int]
    """Place among its siblings, the most likely or first drawn one 0."""
    kinds: Sequence[NodeKind]
    rows: Rows | None
    """Laws: one for each parent of LAW nodes, in the order of their first LAW children."""
    ends: bool = False
    """Nothing that is waited for will follow the last node, or the path where there is none."""
    num_bytes: int = 0

    def with_rows(self, rows: Rows) -> Nodes:
        return replace(self, rows=rows)


def to_proto(nodes: Nodes, target_epoch: int, vocab_size: int) -> tpb.Delivery:
    return tpb.Delivery(
        ticket=nodes.ticket,
        target_epoch=target_epoch,
        root_len=nodes.root_len,
        path=np.array(nodes.path, dtype="<i4").tobytes(),
        ids=np.array(nodes.ids, dtype="<i4").tobytes(),
        parents=np.array(nodes.parents, dtype="<i4").tobytes(),
        ranks=bytes(nodes.ranks),
        kinds=bytes(kind.value for kind in nodes.kinds),
        distributions=None if nodes.rows is None else rows_to_proto(nodes.rows, vocab_size),
        ends=nodes.ends,
    )


def from_proto(item: tpb.Delivery, vocab_size: int) -> Nodes:
    """Read and check all that needs no tensor of floats. Raises BadTensor."""
    path, ids = _ids("path", item.path, vocab_size), _ids("ids", item.ids, vocab_size)
    num = len(ids)
    parents = _ints("parents", item.parents)
    ranks, kinds = list(item.ranks), list(item.kinds)
    for name, values in (("parents", parents), ("ranks", ranks), ("kinds", kinds)):
        if len(values) != num:
            raise BadTensor(f"{len(values)} {name} for {num} nodes; each node has one")
    for node, parent in enumerate(parents):
        if not PATH_END <= parent < node:
            raise BadTensor(f"parent of node {node} is {parent}, must be from {PATH_END} to {node - 1}")
    unknown = set(kinds) - _KINDS.keys()
    if unknown:
        raise BadTensor(f"kinds hold {min(unknown)}, must be of {sorted(_KINDS)}")
    drawn_from = {parent for parent, kind in zip(parents, kinds, strict=True) if kind == tpb.NODE_KIND_LAW}
    if drawn_from and not item.HasField("distributions"):
        raise BadTensor("distributions are missing, and nodes were drawn from laws")
    rows = rows_from_proto(item.distributions, len(drawn_from), vocab_size) if drawn_from else None
    return Nodes(
        item.ticket,
        item.root_len,
        path,
        ids,
        parents,
        ranks,
        [_KINDS[kind] for kind in kinds],
        rows,
        item.ends,
        item.ByteSize(),
    )


def _ints(name: str, data: bytes) -> list[int]:
    if len(data) % 4:
        raise BadTensor(f"{name} has {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<i4").tolist()  # type: ignore[no-any-return]


def _ids(name: str, data: bytes, vocab_size: int) -> list[int]:
    if len(data) > 4 * MAX_NODES:
        raise BadTensor(f"{name} has {len(data) // 4} tokens, at most {MAX_NODES} are allowed")
    ids = _ints(name, data)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadTensor(f"{name} hold {token_id}, outside 0 to {vocab_size - 1}")
    return ids
