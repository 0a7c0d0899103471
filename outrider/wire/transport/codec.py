"""Conversion of tensors to and from protobuf messages (little-endian bytes, dtype and shape), and their checks. Imports
no torch.

Drafts encode the distributions of draft tokens with it, and targets decode them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import common_pb2 as pb

if sys.byteorder != "little":  # the wire is little-endian and nothing here swaps bytes
    raise ImportError("outrider runs on little-endian machines only")

ITEM_BYTES = {pb.TENSOR_DTYPE_FLOAT32: 4, pb.TENSOR_DTYPE_INT32: 4}
"""Number of bytes of one element of a tensor, by the protobuf enum of its dtype."""


class BadTensor(ValueError):
    """A tensor from another process has the wrong dtype, shape or size. The error's text has the actual and the
    expected value.
    """


@dataclass(frozen=True, slots=True)
class DenseDistributions:
    """Next-token distributions, each with the log-probs of all tokens of the vocabulary."""

    num_rows: int
    """Number of distributions."""
    data: bytes
    """Log-probs as bytes: float32 [num_rows, vocab_size], little-endian."""


@dataclass(frozen=True, slots=True)
class SparseDistributions:
    """Next-token distributions, each with the log-probs of only a few tokens. The tokens of all distributions are
    concatenated in `ids` and `log_probs`.
    """

    support_sizes: tuple[int, ...]
    """Number of tokens of each distribution."""
    ids: bytes
    """Token ids of all distributions, one after the other, as bytes: int32 [sum(support_sizes)], little-endian."""
    log_probs: bytes
    """Log-probs of the tokens in `ids`, in the same order, as bytes: float32 [sum(support_sizes)], little-endian."""


Rows = DenseDistributions | SparseDistributions


def float32_tensor(data: bytes, shape: Sequence[int]) -> pb.Tensor:
    """Return a protobuf message with a float32 tensor. data: the tensor's elements as little-endian bytes."""
    return pb.Tensor(dtype=pb.TENSOR_DTYPE_FLOAT32, shape=shape, data=data)


def int32_tensor(data: bytes, shape: Sequence[int]) -> pb.Tensor:
    """Return a protobuf message with an int32 tensor. data: the tensor's elements as little-endian bytes."""
    return pb.Tensor(dtype=pb.TENSOR_DTYPE_INT32, shape=shape, data=data)


def distributions_to_proto(rows: Rows, vocab_size: int) -> pb.TokenDistributions:
    """Convert next-token distributions (`rows`), dense or sparse, over a vocabulary of `vocab_size` tokens to a
    protobuf message.
    """
    if isinstance(rows, DenseDistributions):
        dense = float32_tensor(rows.data, (rows.num_rows, vocab_size))
        return pb.TokenDistributions(vocab_size=vocab_size, dense=dense)
    total = sum(rows.support_sizes)
    return pb.TokenDistributions(
        vocab_size=vocab_size,
        sparse_ids=int32_tensor(rows.ids, (total,)),
        sparse_logprobs=float32_tensor(rows.log_probs, (total,)),
        support_sizes=rows.support_sizes,
    )


def distributions_from_proto(message: pb.TokenDistributions, num_rows: int, vocab_size: int) -> Rows:
    """Convert a protobuf message to `num_rows` next-token distributions over `vocab_size` tokens. Raises BadTensor for
    wrong shapes and sizes. The values of ids and log-probs are checked later, when they become torch tensors.
    """
    if message.vocab_size != vocab_size:
        raise BadTensor(f"vocab_size is {message.vocab_size}, the target's is {vocab_size}")
    if message.HasField("dense"):
        data = _data(message.dense, "dense", pb.TENSOR_DTYPE_FLOAT32, (num_rows, vocab_size))
        return DenseDistributions(num_rows, data)
    sizes = tuple(message.support_sizes)
    if len(sizes) != num_rows:
        raise BadTensor(f"support_sizes has {len(sizes)} entries, expected {num_rows}")
    if any(not 1 <= size <= vocab_size for size in sizes):
        raise BadTensor(f"support_sizes is {sizes}, each must be from 1 to {vocab_size}")
    total = sum(sizes)
    ids = _data(message.sparse_ids, "sparse_ids", pb.TENSOR_DTYPE_INT32, (total,))
    log_probs = _data(message.sparse_logprobs, "sparse_logprobs", pb.TENSOR_DTYPE_FLOAT32, (total,))
    return SparseDistributions(sizes, ids, log_probs)


def _data(tensor: pb.Tensor, name: str, dtype: pb.TensorDType, shape: tuple[int, ...]) -> bytes:
    if tensor.dtype != dtype:
        raise BadTensor(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != shape:
        raise BadTensor(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    data = tensor.data  # every access copies
    if len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BadTensor(f"{name} has {len(data)} bytes, its shape {shape} needs {math.prod(shape) * ITEM_BYTES[dtype]}")
    return data
