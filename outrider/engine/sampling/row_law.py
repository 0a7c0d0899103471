"""The law of one token on the host: which ids can come, and with what probability. NumPy.

Both workers draw from it, the draft ships it and the target reads what was shipped into it. Its probabilities are the
float64 exponentials of its float32 scores over their sum, whatever the scores add up to: they alone decide a draw.

Which entries of one row of scores pass top-k and top-p, without sorting the vocabulary. NumPy, on the host.

Exact: a bound that is cheap to find (from maxima of chunks, from the total mass, from a sample) discards most of the
row, and the rule itself is then applied to what is left. Called by `host_sampling.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.float64]
Array = TypeVar("Array", Tensor, NDArray[np.float64])
"""Of what is written once for both."""

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


_CHUNK = 512
"""Longer rows are drawn from in two steps: a chunk by the chunks' sums, then an entry of it."""


class NothingToDraw(ValueError):
    """A row without positive finite mass."""


@dataclass(frozen=True)
class RowLaw:
    """Sparse with `ids`, over the whole vocabulary without."""

    vocab_size: int
    scores: Scores
    """[N] float32, logarithms of the probabilities up to a constant, none far above 0; -inf for no mass."""
    ids: Ids | None = None
    """[N] int64, ascending; None: entry i is id i, N = vocab_size."""

    @cached_property
    def weights(self) -> Weights:
        """[N] float64, not normalised."""
        return np.exp(self.scores, dtype=np.float64)

    @cached_property
    def total(self) -> float:
        return float(self.weights.sum())

    def prob(self, token_id: int) -> float:
        """Of one id; 0 outside the support."""
        place = self.place_of(token_id)
        return 0.0 if place is None else float(self.weights[place]) / self.total

    def score(self, token_id: int) -> float:
        """Of one id; -inf outside the support."""
        place = self.place_of(token_id)
        return -math.inf if place is None else float(self.scores[place])

    def probs(self) -> Weights:
        """[N] float64, of its own entries."""
        return self.weights / self.total

    def probs_at(self, other: RowLaw) -> Weights:
        """[N of other] float64: of the ids of `other`'s entries."""
        mine = self.probs()
        if other.ids is None:
            return mine if self.ids is None else _spread(self.ids, mine, self.vocab_size)
        if self.ids is None:
            return mine[other.ids]
        places = np.minimum(np.searchsorted(self.ids, other.ids), self.ids.size - 1)
        return np.where(self.ids[places] == other.ids, mine[places], 0.0)

    def draw(self, u: float) -> int:
        """Inverse CDF in the order of ids, u in (0, 1). Raises NothingToDraw."""
        return self.id_of(draw_place(self.weights, u))

    def id_of(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def place_of(self, token_id: int) -> int | None:
        """None where it has no entry."""
        if self.ids is None:
            return token_id
        place = int(np.searchsorted(self.ids, token_id))
        return place if place < self.ids.size and self.ids[place] == token_id else None

    def without(self, token_id: int) -> RowLaw:
        """What is left to draw from after it."""
        place = self.place_of(token_id)
        if place is None:
            return self
        scores = self.scores.copy()
        scores[place] = -math.inf
        return RowLaw(self.vocab_size, scores, self.ids)

    def normalised(self) -> RowLaw:
        """With scores that are log-probs. Their rounding changes the law: before the draw, never after it."""
        mass = float(np.exp(self.scores).sum())  # in float32, which does: the law divides by its own sum
        return RowLaw(self.vocab_size, self.scores - np.float32(math.log(mass)), self.ids)

    def dense_scores(self) -> Scores:
        """[V] float32, -inf outside the support."""
        return self.scores if self.ids is None else _spread(self.ids, self.scores, self.vocab_size, -math.inf)

    def support(self) -> tuple[Ids, Scores]:
        """Ids with mass, ascending, and their scores."""
        places = np.flatnonzero(self.scores > -math.inf)
        return places if self.ids is None else self.ids[places], self.scores[places]


def truncate_topk(law: RowLaw, n: int) -> RowLaw:
    """Its n most likely ids: the law the draft then draws from. Unchanged when it has no more."""
    if n < 1:
        raise ValueError(f"n is {n}, must be at least 1")
    if law.scores.size <= n:
        return law
    places = exactly_best(law.scores, n)
    kept = law.scores[places]
    if kept[kept.argmin()] == -math.inf:
        places = places[kept > -math.inf]
        kept = law.scores[places]
    return RowLaw(law.vocab_size, kept, places if law.ids is None else law.ids[places])


def draw_place(weights: Weights, u: float) -> int:
    """Inverse CDF over weights [N] float64 >= 0 that need not sum to 1, u in (0, 1): an index with mass.

    Raises NothingToDraw.
    """
    start = 0
    if weights.size > _CHUNK:
        chunk_cdf = np.cumsum(_chunk_sums(weights))
        total = float(chunk_cdf[-1])
        goal = u * total
        chunk = min(int(np.searchsorted(chunk_cdf, goal, side="right")), chunk_cdf.size - 1)
        goal -= float(chunk_cdf[chunk - 1]) if chunk else 0.0
        start = chunk * _CHUNK
        weights = weights[start : start + _CHUNK]
        cdf = np.cumsum(weights)
    else:
        cdf = np.cumsum(weights)
        total = float(cdf[-1])
        goal = u * total
    if not 0.0 < total < math.inf:
        raise NothingToDraw(f"nothing to draw from: the row sums to {total}")
    place = int(np.searchsorted(cdf, goal, side="right"))
    if place == cdf.size:  # the chunk's own sum rounded below its goal: the last with mass
        place = int(np.flatnonzero(weights)[-1])
    return start + place


def _chunk_sums(weights: Weights) -> Weights:
    whole = weights.size - weights.size % _CHUNK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _CHUNK))  # half the time of `sum`
    return sums if whole == weights.size else np.append(sums, weights[whole:].sum())


def _spread(ids: Ids, values: NDArray, size: int, fill: float = 0.0) -> NDArray:
    """[size], `values` at `ids` and `fill` elsewhere."""
    out = np.full(size, fill, dtype=values.dtype)
    out[ids] = values
    return out
