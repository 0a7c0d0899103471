"""Deliveries: nodes of a draft worker's tree on their way to a target, as plain values and as protobuf. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from outrider.engine.speculation.draft_tree import ROOT
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import MAX_CHOICES
from outrider.wire.transport.codec import BadTensor, Rows, distributions_from_proto, distributions_to_proto

MAX_NODES = 256
"""Maximum number of nodes of one delivery."""
MAX_BUFFERED_NODES = 1024
"""Maximum number of nodes that a target buffers for one ticket."""


class NodeKind(Enum):
    """Kind of a node of a draft worker's tree."""

    DETERMINISTIC = tpb.NODE_KIND_DETERMINISTIC
    """Draft token that was proposed without a distribution."""
    SAMPLED = tpb.NODE_KIND_SAMPLED
    """Draft token that was drawn from a distribution, which is delivered with it."""
    RECOVERY = tpb.NODE_KIND_RECOVERY
    """Recovery node: a token that the target may draw after a rejection. Never verified; nodes after it may be."""
    REFERENCE = tpb.NODE_KIND_REFERENCE
    """Reference node: a node that was delivered before, sent again as the parent of others. A target that does not have
    it drops the nodes below it."""


_KINDS = {kind.value: kind for kind in NodeKind}


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message with draft tokens from a draft worker to a target: a tree of N nodes after the first root_len
    committed tokens of a slot.

    the -> cat -> sat, and dog beside cat: ids [cat, dog, sat], parents [-1, -1, 0], ranks [0, 1, 0]
    """

    ticket: int
    """Ticket of the lease for which the nodes were made."""
    root_len: int
    """Number of committed tokens that the first nodes follow."""
    ids: Sequence[int]
    """Token ids, [N]."""
    parents: Sequence[int]
    """Index of each node's parent, which comes before it; ROOT for the last of the root_len tokens, or ROOT - b for
    live beam b of a beam search, [N]."""
    ranks: Sequence[int]
    """Rank of each node among its siblings, from 0 for the likeliest or first sampled one, [N]."""
    kinds: Sequence[NodeKind]
    """Kind of each node, [N]."""
    rows: Rows | None
    """Distributions: one for each parent of sampled nodes, in the order of their first sampled children; None if no
    node is sampled."""
    ends: Sequence[int] = ()
    """Indices of the nodes, or ROOT, after which the draft worker sends no more draft tokens for now. A step of the
    target then does not wait for any."""
    num_bytes: int = 0
    """Size in bytes of the message in which the target received the delivery; 0 in the draft worker that sends it."""
    vocab_size: int = 0
    """Number of ids in a whole distribution; needed only to send a delivery with distributions."""
    draft_us: int = 0
    """Microseconds that the draft worker spent on making the nodes; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class InsertedNodes:
    """How many of a delivery's nodes were not put into the target's draft buffer, and why."""

    num_late: int = 0
    """Number of draft tokens that came too late: the same tokens are already committed at their positions."""
    num_dropped: int = 0
    """Number of new nodes that were not kept, because the buffer has no parent for them or no room."""
    is_full: bool = False
    """Whether nodes were dropped because the buffer has reached its maximum size in bytes."""


def write_delivery(delivery: Delivery, target_epoch: int) -> tpb.Delivery:
    """Return a delivery as a protobuf message. target_epoch: epoch of the target to which it goes."""
    distributions = None
    if delivery.rows is not None:
        distributions = distributions_to_proto(delivery.rows, delivery.vocab_size)
    return tpb.Delivery(
        ticket=delivery.ticket,
        target_epoch=target_epoch,
        root_len=delivery.root_len,
        ids=np.array(delivery.ids, dtype="<i4").tobytes(),
        parents=np.array(delivery.parents, dtype="<i4").tobytes(),
        ranks=bytes(delivery.ranks),
        kinds=bytes(kind.value for kind in delivery.kinds),
        distributions=distributions,
        ends=np.array(delivery.ends, dtype="<i4").tobytes(),
        draft_us=delivery.draft_us,
    )


def read_delivery(item: tpb.Delivery, vocab_size: int) -> Delivery:
    """Return the delivery in a protobuf message. Raises BadTensor if a field is invalid; the values of distributions
    are not checked.

    vocab_size: number of ids of the target's vocabulary, to which the token ids belong.
    """
    ids = _ints("ids", item.ids, MAX_NODES, range(vocab_size))
    num = len(ids)
    parents = _ints("parents", item.parents, MAX_NODES, range(ROOT - MAX_CHOICES + 1, MAX_NODES))
    for name, values in (("parents", parents), ("ranks", item.ranks), ("kinds", item.kinds)):
        if len(values) != num:
            raise BadTensor(f"{len(values)} {name} for {num} nodes; each node has one")
    kinds = list[NodeKind]()
    sampled_parents = set[int]()
    for node, (parent, number) in enumerate(zip(parents, item.kinds, strict=True)):
        if parent >= node:
            raise BadTensor(f"parent of node {node} is {parent}, must come before it")
        kind = _KINDS.get(number)
        if kind is None:
            raise BadTensor(f"kinds hold {number}, must be of {sorted(_KINDS)}")
        if kind is NodeKind.SAMPLED:
            sampled_parents.add(parent)
        kinds.append(kind)
    rows = None
    if sampled_parents:
        if not item.HasField("distributions"):
            raise BadTensor("distributions are missing, and nodes were drawn from laws")
        rows = distributions_from_proto(item.distributions, len(sampled_parents), vocab_size)
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
    if len(data) % 4:
        raise BadTensor(f"{name} has {len(data)} bytes, not a multiple of 4")
    values: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    if len(values) > max_num:
        raise BadTensor(f"{name} has {len(values)} entries, at most {max_num} are allowed")
    for value in values:
        if value not in allowed:
            raise BadTensor(f"{name} hold {value}, outside {allowed.start} to {allowed.stop - 1}")
    return values
