"""Which entries of one row of scores pass top-k and top-p, without sorting the vocabulary. NumPy, on the host.

Exact: a bound that is cheap to find (from maxima of chunks, from the total mass, from a sample) discards most of the
row, and the rule itself is then applied to what is left. Called by `host_sampling.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.float64]

_MAX_CHUNK = 64
"""Entries that one maximum stands for."""
_MIN_CHUNKS = 4
"""Per entry wanted: with fewer, most entries would pass the bound."""
_NUM_SORTED = 512
"""Up to so many candidates are sorted at once; of more, the part in which the edge lies is looked for first."""
_NUM_BINS = 1024
_LEAST, _WORST = 1e-30, 745.0
"""Of a score below 0: far from dividing by zero, and so low that its exponential is 0 in float64."""
_SLACK = 1e-3
_SURE = 1e-9
"""Both far above the rounding of what they are compared with: a bound may keep too much, never too little."""


def kth_best(x: Scores, k: int) -> np.float32:
    """The k-th largest of x [N], 1 <= k <= N."""
    length = min(_MAX_CHUNK, x.size // (_MIN_CHUNKS * k))
    if length < 4:
        return np.partition(x, x.size - k)[x.size - k]
    num_chunks = x.size // length
    best = x[: num_chunks * length].reshape(length, num_chunks).max(axis=0)  # strided chunks: one pass, vectorised
    bound = np.partition(best, num_chunks - k)[num_chunks - k]  # k chunks have an entry of at least this
    candidates = x[x >= bound]
    return np.partition(candidates, candidates.size - k)[candidates.size - k]


def exactly_best(x: Scores, n: int) -> Ids:
    """Ids of the n largest of x [N], ascending; among equals at the edge the lowest. 1 <= n <= N."""
    edge = kth_best(x, n)
    ids = np.flatnonzero(x >= edge)
    return ids if ids.size == n else _without_last_equals(ids, x[ids] == edge, ids.size - n)


def nucleus(scores: Scores, top_p: float) -> Ids:
    """Ids of the smallest set of at least top_p of the mass, ascending; among equals at its edge the lowest.

    scores [N]: logarithms of unnormalised probabilities, the largest 0; top_p in (0, 1).
    """
    weights = np.exp(scores, dtype=np.float64)
    total = float(weights.sum())
    candidates: Ids | None = None
    possible = scores >= _lowest(total, top_p, scores.size)
    if np.count_nonzero(possible) * 2 < scores.size:  # else taking them costs more than it saves
        candidates = np.flatnonzero(possible)
        scores, weights = scores[candidates], weights[candidates]
    edge, num_equal = _edge(scores, weights, total * top_p)
    kept = np.flatnonzero(scores >= edge)
    num_over = int(np.count_nonzero(scores == edge)) - num_equal
    if num_over:
        kept = _without_last_equals(kept, scores[kept] == edge, num_over)
    return kept if candidates is None else candidates[kept]


def _lowest(total: float, top_p: float, num: int) -> float:
    """No entry below this is in the nucleus: all of them together weigh less than what may be left out."""
    if 1.0 - top_p < _SURE:
        return -math.inf
    return math.log(total * (1.0 - top_p) / num) - _SLACK


def _edge(scores: Scores, weights: Weights, wanted: float) -> tuple[np.float32, int]:
    """The smallest score in the nucleus, and how many entries of that score are in it. All [N], holding the nucleus."""
    above = 0.0
    if scores.size > _NUM_SORTED:
        above, inner = _around_edge(scores, weights, wanted)
        scores = scores[inner]
    descending = np.sort(scores)[::-1]
    reached = np.cumsum(np.exp(descending, dtype=np.float64))
    before = above + np.concatenate(([0.0], reached[:-1]))  # mass of the more likely ones
    num_kept = max(1, int(np.count_nonzero(before < wanted)))
    edge = descending[num_kept - 1]
    return edge, num_kept - int(np.count_nonzero(descending > edge))


def _around_edge(scores: Scores, weights: Weights, wanted: float) -> tuple[float, Ids]:
    """By a histogram: the mass of the most likely entries, and the indices of those after them with the edge."""
    worst = float(-scores.min())
    places = scores * np.float32(-_NUM_BINS / min(max(worst, _LEAST), _WORST))
    if worst > _WORST:
        places = np.minimum(places, np.float32(_NUM_BINS))
    bins = places.astype(np.int32)
    reached = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(reached, wanted)), reached.size - 1)
    return float(reached[edge - 1]) if edge else 0.0, np.flatnonzero(bins == edge)


def _without_last_equals(ids: Ids, equal: NDArray[np.bool_], num_over: int) -> Ids:
    """`ids` without the last num_over of those that are `equal` to the edge."""
    over = np.flatnonzero(equal)[equal.sum() - num_over :]
    return np.delete(ids, over)
