"""Tensors on the wire: what goes in comes out, and what breaks a rule is refused by name."""

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.v1 import common_pb2 as pb
from outrider.wire.transport.codec import (
    BadTensor,
    DenseDistributions,
    SparseDistributions,
    distributions_from_proto,
    distributions_to_proto,
    float32_tensor,
    int32_tensor,
)
from tests.unit.outrider.wire.transport.rows import laws
from tests.wire_rows import decode_rows, encode_rows

VOCAB = 50


def over_the_wire(rows: DenseDistributions | SparseDistributions) -> pb.TokenDistributions:
    return pb.TokenDistributions.FromString(distributions_to_proto(rows, VOCAB).SerializeToString())


@given(
    num_rows=st.integers(1, 6), support=st.integers(1, VOCAB), seed=st.integers(0, 9999), prefer_sparse=st.booleans()
)
@settings(max_examples=80)
def test_round_trip_is_exact_to_the_bit(num_rows: int, support: int, seed: int, prefer_sparse: bool) -> None:
    log_probs, ids = laws(num_rows, support, seed)
    rows = encode_rows(log_probs, prefer_sparse=prefer_sparse)
    assert isinstance(rows, SparseDistributions) is (prefer_sparse or support * 2 < VOCAB)
    back = decode_rows(distributions_from_proto(over_the_wire(rows), num_rows, VOCAB), VOCAB, ids)
    assert back.dtype == torch.float32 and torch.equal(back, log_probs)


def test_rows_of_different_support() -> None:
    log_probs = torch.cat([laws(1, n, n)[0] for n in (1, 7, 3)])
    ids = log_probs.argmax(dim=1).tolist()
    rows = encode_rows(log_probs, prefer_sparse=True)
    assert isinstance(rows, SparseDistributions) and rows.support_sizes == (1, 7, 3)
    assert torch.equal(decode_rows(rows, VOCAB, ids), log_probs)


def test_bytes_are_little_endian_and_row_major() -> None:
    log_probs = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]]).log()
    dense = encode_rows(log_probs, prefer_sparse=False)
    assert isinstance(dense, DenseDistributions)
    assert struct.unpack("<8f", dense.data)[:2] == pytest.approx([math.log(0.5), math.log(0.25)])
    sparse = encode_rows(log_probs, prefer_sparse=True)
    assert isinstance(sparse, SparseDistributions)
    assert struct.unpack("<4i", sparse.ids) == (0, 1, 2, 2)
    assert struct.unpack("<4f", sparse.log_probs)[3] == 0.0


def dense_message(**fields: Any) -> pb.TokenDistributions:
    data = b"\0" * (2 * VOCAB * 4)
    tensor = {"dtype": pb.TENSOR_DTYPE_FLOAT32, "shape": (2, VOCAB), "data": data, **fields}
    return pb.TokenDistributions(vocab_size=VOCAB, dense=pb.Tensor(**tensor))


def sparse_message(sizes: tuple[int, ...] = (1, 2), num_ids: int = 3, num_probs: int = 3) -> pb.TokenDistributions:
    return pb.TokenDistributions(
        vocab_size=VOCAB,
        sparse_ids=int32_tensor(b"\0" * 4 * num_ids, (num_ids,)),
        sparse_logprobs=float32_tensor(b"\0" * 4 * num_probs, (num_probs,)),
        support_sizes=sizes,
    )


@pytest.mark.parametrize(
    "message, named",
    [
        (pb.TokenDistributions(), "vocab_size is 0"),
        (pb.TokenDistributions(vocab_size=VOCAB), "support_sizes has 0"),
        (pb.TokenDistributions(vocab_size=VOCAB + 1, dense=dense_message().dense), "vocab_size is 51"),
        (dense_message(dtype=pb.TENSOR_DTYPE_INT32), "dense has dtype 2"),
        (dense_message(dtype=pb.TENSOR_DTYPE_UNSPECIFIED), "dense has dtype 0"),
        (dense_message(shape=(VOCAB, 2)), "shape (50, 2), expected (2, 50)"),
        (dense_message(shape=(100,)), "shape (100,)"),
        (dense_message(shape=()), "shape ()"),
        (dense_message(data=b""), "0 bytes"),
        (dense_message(data=b"\0" * 401), "401 bytes"),
        (sparse_message(sizes=(1, 2, 3)), "support_sizes has 3"),
        (sparse_message(sizes=(0, 3)), "each must be from 1 to 50"),
        (sparse_message(sizes=(1, 51)), "each must be from 1 to 50"),
        (sparse_message(sizes=(1, 1)), "shape (3,), expected (2,)"),
        (sparse_message(num_ids=2), "sparse_ids has shape (2,)"),
        (sparse_message(num_probs=4), "sparse_logprobs has shape (4,)"),
    ],
)
def test_malformed_messages(message: pb.TokenDistributions, named: str) -> None:
    with pytest.raises(BadTensor) as error:
        distributions_from_proto(message, 2, VOCAB)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "ids, named",
    [((3, 3, 7), "repeat"), ((3, VOCAB, 7), "outside"), ((3, -1, 7), "outside"), ((3, 4, -(2**31)), "outside")],
)
def test_sparse_ids(ids: tuple[int, int, int], named: str) -> None:
    log_probs = struct.pack("<3f", math.log(0.5), math.log(0.5), 0.0)
    with pytest.raises(BadTensor, match=named):
        decode_rows(SparseDistributions((2, 1), struct.pack("<3i", *ids), log_probs), VOCAB, [3, 7])
