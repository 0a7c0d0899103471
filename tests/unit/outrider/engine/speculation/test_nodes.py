"""Nodes of a draft's tree over the wire: what is read is what was sent, and what breaks a rule is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.sampling.wire_tensors import encode_distributions
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import MAX_NODES, Delivery, NodeKind, read_delivery, write_delivery
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.codec import BadTensor, SparseDistributions

VOCAB_SIZE = 16
LAW = TokenDistribution(VOCAB_SIZE, np.log(np.array([0.75, 0.25], dtype=np.float32)), np.array([3, 5]))


def tree() -> Delivery:
    """One that was delivered before, under it two draws and a key, and a guess beside it."""
    kinds = [NodeKind.REFERENCE, NodeKind.DETERMINISTIC, NodeKind.SAMPLED, NodeKind.SAMPLED, NodeKind.RECOVERY]
    rows = encode_distributions([LAW], prefer_sparse=True)
    return Delivery(
        9, 40, [2, 7, 3, 5, 8], [ROOT, ROOT, 0, 0, 0], [0, 1, 0, 1, 2], kinds, rows, [ROOT, 2], vocab_size=VOCAB_SIZE
    )


def sent(**changes: Any) -> tpb.Delivery:
    message = write_delivery(tree(), 4)
    for name, value in changes.items():
        message.ClearField(name)
        if value is not None:
            setattr(message, name, value)
    return message


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def test_what_is_read_is_what_was_sent() -> None:
    message, before = sent(), tree()
    found = read_delivery(message, VOCAB_SIZE)
    for name in ("ticket", "root_len", "ids", "parents", "ranks", "kinds", "ends"):
        assert getattr(found, name) == getattr(before, name), name
    assert read_delivery(write_delivery(replace(before, draft_us=70), 4), VOCAB_SIZE).draft_us == 70
    assert found.num_bytes == message.ByteSize()
    assert isinstance(found.rows, SparseDistributions) and len(found.rows.support_sizes) == 1


def test_only_an_end_may_be_delivered() -> None:
    found = read_delivery(write_delivery(Delivery(1, 3, [], [], [], [], None, [ROOT]), 4), VOCAB_SIZE)
    assert (found.ids, found.ends, found.rows) == ([], [ROOT], None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ids": ints(2, 7, 3, 5, VOCAB_SIZE)}, "outside 0 to 15"),
        ({"ids": ints(2, 7, -1, 5, 8)}, "ids hold -1"),
        ({"ids": ints(*[1] * (MAX_NODES + 1))}, "at most 256"),
        ({"ids": b"123"}, "multiple of 4"),
        ({"parents": ints(-1, -1, 0, 0)}, "4 parents for 5 nodes"),
        ({"parents": ints(-1, -1, 0, 3, 0)}, "parent of node 3 is 3"),
        ({"parents": ints(-129, -1, 0, 0, 0)}, "parents hold -129"),
        ({"ranks": bytes(4)}, "4 ranks for 5 nodes"),
        ({"kinds": bytes([1, 1, 1, 1, 99])}, "kinds hold 99"),
        ({"ends": ints(5)}, "ends hold 5, outside -1 to 4"),
        ({"ends": ints(-2)}, "ends hold -2, outside -1 to 4"),
        ({"ends": ints(*[0] * 7)}, "ends has 7 entries, at most 6"),
        ({"distributions": None}, "distributions are missing"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadTensor, match=why):
        read_delivery(sent(**changes), VOCAB_SIZE)
