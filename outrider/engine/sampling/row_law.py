"""The law of one token on the host: which ids can come, and with what probability. NumPy.

Both workers draw from it, the draft ships it and the target reads what was shipped into it. Its probabilities are the
float64 exponentials of its float32 scores over their sum, whatever the scores add up to: they alone decide a draw.

Top-k and top-p sort no vocabulary, and are exact: a bound that is cheap to find (from maxima of chunks, from the total
mass) discards most of the row, and the rule itself is then applied to what is left. Called by `host_sampling.py`.
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
"""Takes and returns either kind, where one function serves both."""

COLDEST = float(np.finfo(np.float32).tiny)
"""Least temperature; lower ones act as this one, for float32 would divide by zero."""
_MAX_CHUNK = 64
"""Most entries that one maximum stands for. Doubling it halves the maxima, and lets more entries pass the bound."""
_MIN_CHUNKS = 4
"""Maxima for each entry wanted: with fewer, most entries would pass the bound. Doubling it sorts twice as many."""
_NUM_SORTED = 512
"""Candidates that are sorted at once; of more, the part with the edge is looked for first. Doubling it doubles a
sort."""
_NUM_BINS = 1024
"""Parts that are looked through for the edge. Doubling it halves what is sorted then."""
_LEAST, _WORST = 1e-30, 745.0
"""Bounds of a score below 0: far from dividing by zero, and so low that its exponential is 0 in float64."""
_SLACK = 1e-3
"""Margin of a bound on scores, far above their rounding: too much is kept, never too little. Doubled, a little more."""
_SURE = 1e-9
"""The same of the mass 1 - top_p: with less, no bound is used."""


def kth_best(x: Scores, k: int) -> np.float32:
    """Return the k-th largest of x [N], 1 <= k <= N."""
    length = min(_MAX_CHUNK, x.size // (_MIN_CHUNKS * k))
    if length < 4:
        return np.partition(x, x.size - k)[x.size - k]
    num_chunks = x.size // length
    best = x[: num_chunks * length].reshape(length, num_chunks).max(axis=0)  # strided chunks: one pass, vectorised
    bound = np.partition(best, num_chunks - k)[num_chunks - k]  # k chunks have an entry of at least this
    candidates = x[x >= bound]
    return np.partition(candidates, candidates.size - k)[candidates.size - k]


def exactly_best(x: Scores, n: int) -> Ids:
    """Return the ids of the n largest of x [N], ascending; among equals at the edge the lowest."""
    edge = kth_best(x, n)
    ids = np.flatnonzero(x >= edge)
    return ids if ids.size == n else _without_last_equals(ids, x[ids] == edge, ids.size - n)


def nucleus(scores: Scores, top_p: float) -> Ids:
    """Return the ids of the smallest set of at least top_p of the mass, ascending; among equals at its edge the lowest.

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
    """Return a bound below which no entry is in the nucleus: all of them together weigh less than may be left out."""
    if 1.0 - top_p < _SURE:
        return -math.inf
    return math.log(total * (1.0 - top_p) / num) - _SLACK


def _edge(scores: Scores, weights: Weights, wanted: float) -> tuple[np.float32, int]:
    """Return the smallest score in the nucleus, and how many entries of that score are in it. All [N]."""
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
    """Return, by a histogram, the mass of the most likely entries and the indices of those after them with the edge."""
    worst = float(-scores.min())
    places = scores * np.float32(-_NUM_BINS / min(max(worst, _LEAST), _WORST))
    if worst > _WORST:
        places = np.minimum(places, np.float32(_NUM_BINS))
    bins = places.astype(np.int32)
    reached = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(reached, wanted)), reached.size - 1)
    return float(reached[edge - 1]) if edge else 0.0, np.flatnonzero(bins == edge)


def _without_last_equals(ids: Ids, equal: NDArray[np.bool_], num_over: int) -> Ids:
    """Return `ids` without the last num_over of those that are `equal` to the edge."""
    over = np.flatnonzero(equal)[equal.sum() - num_over :]
    return np.delete(ids, over)


_CHUNK = 512
"""Entries of the longest row that is drawn from at once, and of a chunk of longer ones, which is drawn first.
Doubling it halves the chunks."""


class NothingToDraw(ValueError):
    """Raised for a row without positive finite mass."""


@dataclass(frozen=True)
class RowLaw:
    """A distribution over token ids: sparse with `ids`, over the whole vocabulary without."""

    vocab_size: int
    scores: Scores
    """[N] float32, logarithms of the probabilities up to a constant, none far above 0; -inf for no mass."""
    ids: Ids | None = None
    """[N] int64, ascending; None: entry i is id i, N = vocab_size."""

    @cached_property
    def weights(self) -> Weights:
        """The probabilities [N] float64, not normalised."""
        return np.exp(self.scores, dtype=np.float64)

    @cached_property
    def total(self) -> float:
        return float(self.weights.sum())

    def prob(self, token_id: int) -> float:
        """Return the probability of one id; 0 outside the support."""
        place = self.place_of(token_id)
        return 0.0 if place is None else float(self.weights[place]) / self.total

    def score(self, token_id: int) -> float:
        """Return the score of one id; -inf outside the support."""
        place = self.place_of(token_id)
        return -math.inf if place is None else float(self.scores[place])

    def probs(self) -> Weights:
        """Return the probabilities [N] float64 of its entries."""
        return self.weights / self.total

    def probs_at(self, other: RowLaw) -> Weights:
        """Return the probabilities [N of other] float64 of the ids of `other`'s entries."""
        mine = self.probs()
        if other.ids is None:
            return mine if self.ids is None else _spread(self.ids, mine, self.vocab_size)
        if self.ids is None:
            return mine[other.ids]
        places = np.minimum(np.searchsorted(self.ids, other.ids), self.ids.size - 1)
        return np.where(self.ids[places] == other.ids, mine[places], 0.0)

    def draw(self, u: float) -> int:
        """Draw an id by the inverse CDF in the order of ids, u in (0, 1). Raises NothingToDraw."""
        return self.id_of(draw_place(self.weights, u))

    def id_of(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def place_of(self, token_id: int) -> int | None:
        """Return the entry of an id, None where it has none."""
        if self.ids is None:
            return token_id
        place = int(np.searchsorted(self.ids, token_id))
        return place if place < self.ids.size and self.ids[place] == token_id else None

    def without(self, token_id: int) -> RowLaw:
        """Return the law that is left when this id cannot come again."""
        place = self.place_of(token_id)
        if place is None:
            return self
        scores = self.scores.copy()
        scores[place] = -math.inf
        return RowLaw(self.vocab_size, scores, self.ids)

    def normalised(self) -> RowLaw:
        """Return the law with scores that are log-probs. Rounding changes it: before the draw, never after it."""
        mass = float(np.exp(self.scores).sum())  # in float32, which does: the law divides by its own sum
        return RowLaw(self.vocab_size, self.scores - np.float32(math.log(mass)), self.ids)

    def dense_scores(self) -> Scores:
        """Return the scores [V] float32, -inf outside the support."""
        return self.scores if self.ids is None else _spread(self.ids, self.scores, self.vocab_size, -math.inf)

    def support(self) -> tuple[Ids, Scores]:
        """Return the ids with mass, ascending, and their scores."""
        places = np.flatnonzero(self.scores > -math.inf)
        return places if self.ids is None else self.ids[places], self.scores[places]


def one_hot(token_id: int, vocab_size: int) -> RowLaw:
    """Return the law of one id alone."""
    return RowLaw(vocab_size, np.zeros(1, dtype=np.float32), np.array([token_id], dtype=np.int64))


def truncate_topk(law: RowLaw, n: int) -> RowLaw:
    """Return the law of its n most likely ids, n at least 1; itself when it has no more. Cut before a draw."""
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
    """Draw an index with mass by the inverse CDF over weights [N] float64 >= 0 that need not sum to 1, u in (0, 1).

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
    """Return [size] with `values` at `ids` and `fill` elsewhere."""
    out = np.full(size, fill, dtype=values.dtype)
    out[ids] = values
    return out
