"""Log-prob tensors to bytes and back. The draft encodes what it drew from; the target checks every value."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.wire.codec import BadTensor, DenseRows, Rows, SparseRows

MASS_TOLERANCE = 1e-3
"""How far a row's probabilities may sum from 1: rounding of 128k float32 values stays below 1e-4."""


def encode_rows(log_probs: Tensor, *, prefer_sparse: bool) -> Rows:
    """[R, V] float32, -inf outside the support -> the smaller form, or sparse when preferred.

    A sparse entry takes 8 bytes, a dense one 4: sparse wins below half the vocabulary.
    """
    num_rows, vocab_size = log_probs.shape
    support = log_probs > -torch.inf  # [R, V] bool
    sizes = support.sum(dim=1)  # [R]
    if not prefer_sparse and int(sizes.max()) * 2 >= vocab_size:
        return DenseRows(num_rows, _to_bytes(log_probs))
    ids = support.nonzero()[:, 1].to(torch.int32)  # [sum(sizes)], row-major
    return SparseRows(tuple(sizes.tolist()), _to_bytes(ids), _to_bytes(log_probs[support]))


def decode_rows(rows: Rows, vocab_size: int, draft_ids: list[int], device: torch.device) -> Tensor:
    """-> [R, V] float32 log-probs, -inf outside the support.

    Raises BadTensor for NaN, +inf, ids out of range or repeated, a mass that is not 1, or a drafted id without mass:
    acceptance is exact only if these are the rows that the ids were drawn from.
    """
    if isinstance(rows, DenseRows):
        dense = torch.frombuffer(bytearray(rows.data), dtype=torch.float32).view(rows.num_rows, vocab_size)
    else:
        dense = _scatter(rows, vocab_size)
    if bool(torch.isnan(dense).any()):
        raise BadTensor("log-probs hold NaN")
    mass = dense.double().exp().sum(dim=1)  # [R]; +inf shows here
    if not bool(((mass - 1.0).abs() <= MASS_TOLERANCE).all()):
        raise BadTensor(f"probabilities of the rows sum to {[round(m, 6) for m in mass.tolist()]}, each must sum to 1")
    drafted = dense.gather(1, torch.tensor(draft_ids, dtype=torch.int64)[:, None])[:, 0]  # [R]
    if bool((drafted == -torch.inf).any()):
        raise BadTensor("a drafted id has probability 0 in its own row")
    return dense.to(device)


def _scatter(rows: SparseRows, vocab_size: int) -> Tensor:
    ids = torch.frombuffer(bytearray(rows.ids), dtype=torch.int32).long()  # [sum(sizes)]
    values = torch.frombuffer(bytearray(rows.log_probs), dtype=torch.float32)
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise BadTensor(f"sparse_ids hold an id outside 0 to {vocab_size - 1}")
    row = torch.repeat_interleave(torch.arange(rows.num_rows), torch.tensor(rows.row_sizes))
    cells = row * vocab_size + ids
    if cells.unique().numel() != cells.numel():
        raise BadTensor("sparse_ids repeat an id within a row")
    dense = torch.full((rows.num_rows * vocab_size,), -torch.inf)
    dense[cells] = values
    return dense.view(rows.num_rows, vocab_size)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().numpy().tobytes()
