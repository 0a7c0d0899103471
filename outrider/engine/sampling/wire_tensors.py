"""Turn laws to bytes and back. The draft encodes what it drew from; the target checks every value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.row_law import Ids, RowLaw
from outrider.wire.transport.codec import BadTensor, DenseRows, Rows, SparseRows

MASS_TOLERANCE = 1e-3
"""Most by which a row's sum of probabilities may miss 1: rounding of 128k float32 values stays below 1e-4. Doubling it
lets laws through that are twice as far off."""


def encode_laws(laws: Sequence[RowLaw], *, prefer_sparse: bool) -> Rows:
    """Encode laws whose scores are log-probs in the smaller form, or sparse when preferred.

    A sparse entry takes 8 bytes, a dense one 4: sparse wins below half the vocabulary.
    """
    supports = [law.support() for law in laws]
    sizes = tuple(ids.size for ids, _ in supports)
    if not prefer_sparse and max(sizes) * 2 >= laws[0].vocab_size:
        return DenseRows(len(laws), b"".join(law.dense_scores().tobytes() for law in laws))
    ids = np.concatenate([ids for ids, _ in supports]).astype(np.int32)  # row-major
    return SparseRows(sizes, ids.tobytes(), np.concatenate([scores for _, scores in supports]).tobytes())


def decode_laws(rows: Rows, vocab_size: int, drafted: Sequence[Sequence[int]]) -> list[RowLaw]:
    """Return a law per row, over the bytes of `rows`: nothing is copied. drafted: the ids drawn from each row.

    Raises BadTensor for NaN, +inf, ids out of range or repeated, a mass that is not 1, or a drafted id without mass:
    acceptance is exact only if these are the rows that the ids were drawn from.
    """
    if isinstance(rows, DenseRows):
        dense = np.frombuffer(rows.data, dtype=np.float32).reshape(rows.num_rows, vocab_size)
        laws = [RowLaw(vocab_size, scores) for scores in dense]
    else:
        laws = _sparse_laws(rows, vocab_size)
    with np.errstate(over="ignore"):
        totals = [law.total for law in laws]
    if any(math.isnan(total) for total in totals):
        raise BadTensor("log-probs hold NaN")
    if any(abs(total - 1.0) > MASS_TOLERANCE for total in totals):
        raise BadTensor(f"probabilities of the rows sum to {[round(t, 6) for t in totals]}, each must sum to 1")
    if any(law.prob(token_id) == 0.0 for law, ids in zip(laws, drafted, strict=True) for token_id in ids):
        raise BadTensor("a drafted id has probability 0 in its own row")
    return laws


def decode_law(rows: Rows, index: int, vocab_size: int, drafted: Sequence[int]) -> RowLaw:
    """Return the law of one row; as `decode_laws`. Raises BadTensor."""
    return decode_laws(_row(rows, index, vocab_size), vocab_size, [drafted])[0]


def _row(rows: Rows, index: int, vocab_size: int) -> Rows:
    if isinstance(rows, DenseRows):
        return DenseRows(1, rows.data[4 * vocab_size * index : 4 * vocab_size * (index + 1)])
    start = 4 * sum(rows.row_sizes[:index])
    end = start + 4 * rows.row_sizes[index]
    return SparseRows((rows.row_sizes[index],), rows.ids[start:end], rows.log_probs[start:end])


def scattered(laws: Sequence[tuple[int, RowLaw]], num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return [num_rows, V] float32 scores on `device`, each law in the row given with it, -inf elsewhere.

    Sparse laws travel as they are: to a GPU a tenth of a percent of what the rows would.
    """
    out = torch.full((num_rows, vocab_size), -torch.inf, device=device)
    sparse = [(row * vocab_size + law.ids, law.scores) for row, law in laws if law.ids is not None]
    if sparse:
        cells = to_device(np.concatenate([cells for cells, _ in sparse]), device)
        out.view(-1)[cells] = to_device(np.concatenate([scores for _, scores in sparse]), device)
    dense = [(row, law.scores) for row, law in laws if law.ids is None]
    if dense:
        rows = to_device(np.array([row for row, _ in dense]), device)
        out[rows] = to_device(np.stack([scores for _, scores in dense]), device)
    return out


def _sparse_laws(rows: SparseRows, vocab_size: int) -> list[RowLaw]:
    ids = np.frombuffer(rows.ids, dtype=np.int32).astype(np.int64)  # [sum(sizes)]
    scores = np.frombuffer(rows.log_probs, dtype=np.float32)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise BadTensor(f"sparse_ids hold an id outside 0 to {vocab_size - 1}")
    ends = accumulate(rows.row_sizes, initial=0)
    return [_sparse_law(vocab_size, ids[start:end], scores[start:end]) for start, end in pairwise(ends)]


def _sparse_law(vocab_size: int, ids: Ids, scores: np.ndarray) -> RowLaw:
    if not (ids[1:] > ids[:-1]).all():
        order = ids.argsort()
        ids, scores = ids[order], scores[order]
        if (ids[1:] == ids[:-1]).any():
            raise BadTensor("sparse_ids repeat an id within a row")
    return RowLaw(vocab_size, scores, ids)
