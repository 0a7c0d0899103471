"""Distributions as bytes: a draft worker encodes those from which it drew; the target decodes them and checks all
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.token_distribution import Ids, Scores, TokenDistribution
from outrider.wire.transport.codec import BadTensor, DenseDistributions, Rows, SparseDistributions

MASS_TOLERANCE = 1e-3
"""Maximum difference from 1 of the sum of a row's probabilities. The rounding of 128k float32 values stays below
1e-4."""


def encode_distributions(distributions: Sequence[TokenDistribution], *, prefer_sparse: bool) -> Rows:
    """Return distributions, whose scores must be log-probs, as rows of bytes. All rows are sparse (8 bytes for each id
    with mass: the id and its log-prob) if `prefer_sparse` is set or each has mass on fewer than half of the ids;
    otherwise all are dense (V log-probs of 4 bytes).
    """
    sizes = list[int]()
    ids = list[Ids]()
    scores = list[Scores]()
    for distribution in distributions:
        own_ids, own_scores = distribution.support()
        sizes.append(own_ids.size)
        ids.append(own_ids)
        scores.append(own_scores)
    if not prefer_sparse and max(sizes) * 2 >= distributions[0].vocab_size:
        return DenseDistributions(
            len(distributions), b"".join(distribution.dense_scores().tobytes() for distribution in distributions)
        )
    all_ids = np.concatenate(ids).astype(np.int32)  # [sum(sizes)]
    return SparseDistributions(tuple(sizes), all_ids.tobytes(), np.concatenate(scores).tobytes())


def decode_distributions(rows: Rows, vocab_size: int, drafted: Sequence[Sequence[int]]) -> list[TokenDistribution]:
    """Return the distribution of each row in `rows`. The bytes of dense rows are not copied.

    drafted: for each row, the ids that were drawn from it. Raises BadTensor for NaN, +inf, ids that are out of range or
    repeated, a mass that is not 1, and a drafted id without mass: acceptance is exact only if the ids were drawn from
    these rows.
    """
    distributions = list[TokenDistribution]()
    if isinstance(rows, DenseDistributions):
        for scores in np.frombuffer(rows.data, dtype=np.float32).reshape(rows.num_rows, vocab_size):
            distributions.append(TokenDistribution(vocab_size, scores))
    else:
        distributions = _sparse_distributions(rows, vocab_size)
    with np.errstate(over="ignore"):
        totals = [distribution.total for distribution in distributions]
    for total in totals:
        if math.isnan(total):
            raise BadTensor("log-probs hold NaN")
    for total in totals:
        if abs(total - 1.0) > MASS_TOLERANCE:
            rounded = [round(mass, 6) for mass in totals]
            raise BadTensor(f"probabilities of the rows sum to {rounded}, each must sum to 1")
    for distribution, ids in zip(distributions, drafted, strict=True):
        for token_id in ids:
            if distribution.prob(token_id) == 0.0:
                raise BadTensor("a drafted id has probability 0 in its own row")
    return distributions


def decode_distribution(rows: Rows, index: int, vocab_size: int, drafted: Sequence[int]) -> TokenDistribution:
    """Return the distribution of row `index` of `rows`, after checking it. drafted: the ids that were drawn from it.
    Raises BadTensor for NaN, +inf, ids that are out of range or repeated, a mass that is not 1, and a drafted id
    without mass.
    """
    return decode_distributions(_row(rows, index, vocab_size), vocab_size, [drafted])[0]


def _row(rows: Rows, index: int, vocab_size: int) -> Rows:
    if isinstance(rows, DenseDistributions):
        return DenseDistributions(1, rows.data[4 * vocab_size * index : 4 * vocab_size * (index + 1)])
    start = 4 * sum(rows.support_sizes[:index])
    end = start + 4 * rows.support_sizes[index]
    return SparseDistributions((rows.support_sizes[index],), rows.ids[start:end], rows.log_probs[start:end])


def scatter(
    distributions: Sequence[tuple[int, TokenDistribution]], num_rows: int, vocab_size: int, device: torch.device
) -> Tensor:
    """Return the log-probs (up to a constant each) of distributions as a tensor on `device`: [num_rows, V] float32,
    -inf elsewhere.

    distributions: pairs of the row of the tensor into which a distribution is written, and the distribution. Only the
    entries of sparse ones are copied to the device.
    """
    cells = list[Ids]()  # places of sparse entries in the flat result
    sparse_scores = list[Scores]()
    dense_rows = list[int]()
    dense_scores = list[Scores]()
    for row, distribution in distributions:
        if distribution.ids is None:
            dense_rows.append(row)
            dense_scores.append(distribution.scores)
        else:
            cells.append(row * vocab_size + distribution.ids)
            sparse_scores.append(distribution.scores)
    out = torch.full((num_rows, vocab_size), -torch.inf, device=device)  # [num_rows, V]
    if cells:
        out.view(-1)[to_device(np.concatenate(cells), device)] = to_device(np.concatenate(sparse_scores), device)
    if dense_rows:
        out[to_device(np.array(dense_rows), device)] = to_device(np.stack(dense_scores), device)
    return out


def _sparse_distributions(rows: SparseDistributions, vocab_size: int) -> list[TokenDistribution]:
    ids = np.frombuffer(rows.ids, dtype=np.int32).astype(np.int64)  # [sum(sizes)]
    scores = np.frombuffer(rows.log_probs, dtype=np.float32)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise BadTensor(f"sparse_ids hold an id outside 0 to {vocab_size - 1}")
    distributions = list[TokenDistribution]()
    start = 0
    for size in rows.support_sizes:
        end = start + size
        distributions.append(_sparse_distribution(vocab_size, ids[start:end], scores[start:end]))
        start = end
    return distributions


def _sparse_distribution(vocab_size: int, ids: Ids, scores: Scores) -> TokenDistribution:
    if not (ids[1:] > ids[:-1]).all():
        order = ids.argsort()
        ids, scores = ids[order], scores[order]
        if (ids[1:] == ids[:-1]).any():
            raise BadTensor("sparse_ids repeat an id within a row")
    return TokenDistribution(vocab_size, scores, ids)
