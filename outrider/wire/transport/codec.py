"""Tensors on the wire: bytes, dtype and shape, little-endian, checked before anybody reads them. Imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import common_pb2 as pb

if sys.byteorder != "little":  # the wire is little-endian and nothing here swaps bytes
    raise ImportError("outrider runs on little-endian machines only")

ITEM_BYTES = {pb.TENSOR_DTYPE_FLOAT32: 4, pb.TENSOR_DTYPE_INT32: 4}


class BadTensor(ValueError):
    """Raised when a tensor from another process breaks a rule; the message says which."""


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Log-probs [num_rows, vocab_size] float32."""

    num_rows: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Each row's support: ids int32 and log-probs float32, concatenated."""

    row_sizes: tuple[int, ...]
    ids: bytes
    log_probs: bytes

    @property
    def num_rows(self) -> int:
        return len(self.row_sizes)


Rows = DenseRows | SparseRows


def float32_tensor(data: bytes, shape: Sequence[int]) -> pb.Tensor:
    return pb.Tensor(dtype=pb.TENSOR_DTYPE_FLOAT32, shape=shape, data=data)


def int32_tensor(data: bytes, shape: Sequence[int]) -> pb.Tensor:
    return pb.Tensor(dtype=pb.TENSOR_DTYPE_INT32, shape=shape, data=data)


def rows_to_proto(rows: Rows, vocab_size: int) -> pb.TokenDistributions:
    if isinstance(rows, DenseRows):
        dense = float32_tensor(rows.data, (rows.num_rows, vocab_size))
        return pb.TokenDistributions(vocab_size=vocab_size, dense=dense)
    total = sum(rows.row_sizes)
    return pb.TokenDistributions(
        vocab_size=vocab_size,
        sparse_ids=int32_tensor(rows.ids, (total,)),
        sparse_log_probs=float32_tensor(rows.log_probs, (total,)),
        row_sizes=rows.row_sizes,
    )


def rows_from_proto(message: pb.TokenDistributions, num_rows: int, vocab_size: int) -> Rows:
    """Read the rows and check shapes and sizes; values are checked when they become tensors. Raises BadTensor."""
    if message.vocab_size != vocab_size:
        raise BadTensor(f"vocab_size is {message.vocab_size}, the target's is {vocab_size}")
    if message.HasField("dense"):
        data = _data(message.dense, "dense", pb.TENSOR_DTYPE_FLOAT32, (num_rows, vocab_size))
        return DenseRows(num_rows, data)
    sizes = tuple(message.row_sizes)
    if len(sizes) != num_rows:
        raise BadTensor(f"row_sizes has {len(sizes)} entries, expected {num_rows}")
    if any(not 1 <= size <= vocab_size for size in sizes):
        raise BadTensor(f"row_sizes is {sizes}, each must be from 1 to {vocab_size}")
    total = sum(sizes)
    ids = _data(message.sparse_ids, "sparse_ids", pb.TENSOR_DTYPE_INT32, (total,))
    log_probs = _data(message.sparse_log_probs, "sparse_log_probs", pb.TENSOR_DTYPE_FLOAT32, (total,))
    return SparseRows(sizes, ids, log_probs)


def _data(tensor: pb.Tensor, name: str, dtype: pb.TensorDType, shape: tuple[int, ...]) -> bytes:
    if tensor.dtype != dtype:
        raise BadTensor(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != shape:
        raise BadTensor(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    data = tensor.data  # every access copies
    if len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BadTensor(f"{name} has {len(data)} bytes, its shape {shape} needs {math.prod(shape) * ITEM_BYTES[dtype]}")
    return data
