"""The next-token distribution of one row on the host, and draws from it. NumPy.

Both workers draw from it; a draft worker sends it, and the target makes it from the received bytes. Its probabilities
are the float64 exponentials of its float32 scores divided by their sum, whatever that sum is, and nothing else decides
a draw.

Top-k and top-p are exact without sorting the vocabulary: a bound that is cheap to find (from maxima of chunks, from the
total mass) discards most of the row, and the rule is applied to the rest. `host_sampling.py` calls them.
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
"""Array of torch or NumPy, for functions that accept both."""

COLDEST = float(np.finfo(np.float32).tiny)
"""Minimum temperature; lower ones count as this one, since float32 would divide by zero."""
_MAX_CHUNK = 64
"""Maximum number of entries in a chunk. The maxima of chunks give a bound for the k-th largest entry."""
_MIN_CHUNKS = 4
"""Minimum number of chunks divided by k. With fewer chunks most entries would pass the bound."""
_NUM_SORTED = 512
"""Maximum number of entries that are sorted at once. If there are more, a histogram first finds the part that has the
edge."""
_NUM_BINS = 1024
"""Number of bins of that histogram."""
_MIN_RANGE = 1e-30
"""Minimum range of scores, in nats, by which the histogram divides; it is far from 0."""
_MAX_RANGE = 745.0
"""Range of scores, in nats, beyond which an exponential is 0 in float64."""
_SLACK = 1e-3
"""Margin of a bound on scores, in nats, far above their rounding. It keeps too many entries rather than too few."""
_MIN_TAIL = 1e-9
"""Minimum mass 1 - top_p for which a bound is used."""


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
    """Return the indices of the n largest of x [N], ascending; among equals at the edge the lowest."""
    edge = kth_best(x, n)
    ids = np.flatnonzero(x >= edge)
    if ids.size == n:
        return ids
    return _without_last_equals(ids, x[ids] == edge, ids.size - n)


def nucleus(scores: Scores, top_p: float) -> Ids:
    """Return the indices of the smallest set with at least top_p of the mass, ascending; among equals at its edge the
    lowest.

    scores: logarithms of probabilities up to a constant, the largest 0, [N] float32. top_p: in (0, 1).

        probabilities 0.5, 0.25, 0.25 and top_p 0.7: [0, 1]
    """
    weights = np.exp(scores, dtype=np.float64)
    total = float(weights.sum())
    candidates: Ids | None = None
    is_possible = scores >= _lowest(total, top_p, scores.size)
    if np.count_nonzero(is_possible) * 2 < scores.size:  # else to select them costs more than it saves
        candidates = np.flatnonzero(is_possible)
        scores, weights = scores[candidates], weights[candidates]
    edge, num_equal = _edge(scores, weights, total * top_p)
    kept = np.flatnonzero(scores >= edge)
    num_over = int(np.count_nonzero(scores == edge)) - num_equal
    if num_over:
        kept = _without_last_equals(kept, scores[kept] == edge, num_over)
    if candidates is None:
        return kept
    return candidates[kept]


def _lowest(total: float, top_p: float, num: int) -> float:
    # All entries below this score together weigh less than the mass that the nucleus may leave out.
    if 1.0 - top_p < _MIN_TAIL:
        return -math.inf
    return math.log(total * (1.0 - top_p) / num) - _SLACK


def _edge(scores: Scores, weights: Weights, min_mass: float) -> tuple[np.float32, int]:
    """Return the smallest score in the nucleus, and how many entries of that score are in it. Arrays are [N]."""
    above = 0.0
    if scores.size > _NUM_SORTED:
        above, inner = _around_edge(scores, weights, min_mass)
        scores = scores[inner]
    descending = np.sort(scores)[::-1]
    reached = np.cumsum(np.exp(descending, dtype=np.float64))
    before = above + np.concatenate(([0.0], reached[:-1]))  # mass of the more likely ones
    num_kept = max(1, int(np.count_nonzero(before < min_mass)))
    edge = descending[num_kept - 1]
    return edge, num_kept - int(np.count_nonzero(descending > edge))


def _around_edge(scores: Scores, weights: Weights, min_mass: float) -> tuple[float, Ids]:
    """Return the mass of the entries above the histogram bin that has the edge, and the indices of the entries in that
    bin.
    """
    score_range = float(-scores.min())
    places = scores * np.float32(-_NUM_BINS / min(max(score_range, _MIN_RANGE), _MAX_RANGE))  # [N], 0 the likeliest
    if score_range > _MAX_RANGE:
        places = np.minimum(places, np.float32(_NUM_BINS))
    bins = places.astype(np.int32)
    reached = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(reached, min_mass)), reached.size - 1)
    above = 0.0
    if edge:
        above = float(reached[edge - 1])
    return above, np.flatnonzero(bins == edge)


def _without_last_equals(ids: Ids, equal: NDArray[np.bool_], num_over: int) -> Ids:
    # ids [3, 5, 7, 9], equal [no, yes, no, yes], num_over 1: [3, 5, 7]
    over = np.flatnonzero(equal)[equal.sum() - num_over :]
    return np.delete(ids, over)


_CHUNK = 512
"""Maximum number of entries from which a draw is made at once. In longer rows a chunk of this size is drawn first."""


class EmptyDistribution(ValueError):
    """Raised for a row without positive finite mass, from which nothing can be drawn."""


@dataclass(frozen=True)
class TokenDistribution:
    """Distribution over token ids. It has N entries: the ids in `ids`, or the whole vocabulary if `ids` is None."""

    vocab_size: int
    scores: Scores
    """Log-probs up to a constant, [N] float32; -inf for no mass. No score is far above 0, so that `weights` are finite.
    """
    ids: Ids | None = None
    """Token ids of the entries, ascending, [N] int64; None if entry i is id i and N = vocab_size."""

    @cached_property
    def weights(self) -> Weights:
        """Probabilities of the entries up to a factor, [N] float64."""
        return np.exp(self.scores, dtype=np.float64)

    @cached_property
    def total(self) -> float:
        """Sum of `weights`."""
        return float(self.weights.sum())

    def prob(self, token_id: int) -> float:
        """Return the probability of one id; 0 if it has no entry."""
        place = self.index_of(token_id)
        if place is None:
            return 0.0
        return float(self.weights[place]) / self.total

    def score(self, token_id: int) -> float:
        """Return the log-prob of one id, up to the constant of `scores`; -inf if the id has no entry."""
        place = self.index_of(token_id)
        if place is None:
            return -math.inf
        return float(self.scores[place])

    def probs(self) -> Weights:
        """Return the probability of each entry, [N] float64."""
        return self.weights / self.total

    def probs_at(self, other: TokenDistribution) -> Weights:
        """Return this distribution's probabilities at the M entries of another distribution, [M] float64.

        this one 0.7 at id 3 and 0.3 at id 5, the other over ids [3, 4]: [0.7, 0]
        """
        mine = self.probs()
        if self.ids is None:
            return mine if other.ids is None else mine[other.ids]
        if other.ids is None:
            return _spread(self.ids, mine, self.vocab_size)
        places = np.minimum(np.searchsorted(self.ids, other.ids), self.ids.size - 1)
        return np.where(self.ids[places] == other.ids, mine[places], 0.0)

    def draw(self, u: float) -> int:
        """Draw an id by the inverse CDF in the order of ids. u: uniform number in (0, 1). Raises EmptyDistribution if
        the weights have no positive finite sum.
        """
        return self.id_of(draw_index(self.weights, u))

    def id_of(self, index: int) -> int:
        """Return the token id of an entry. index: the entry's index."""
        if self.ids is None:
            return index
        return int(self.ids[index])

    def index_of(self, token_id: int) -> int | None:
        """Return the index of a token id's entry; None if it has none."""
        if self.ids is None:
            return token_id
        place = int(np.searchsorted(self.ids, token_id))
        if place < self.ids.size and self.ids[place] == token_id:
            return place
        return None

    def without(self, token_id: int) -> TokenDistribution:
        """Return the distribution without one id, not normalised. In sampling without replacement, the next sibling of
        that id is drawn from it.
        """
        place = self.index_of(token_id)
        if place is None:
            return self
        scores = self.scores.copy()
        scores[place] = -math.inf
        return TokenDistribution(self.vocab_size, scores, self.ids)

    def normalised(self) -> TokenDistribution:
        """Return the distribution with log-probs as scores. Rounding changes it slightly. So call it before a draw,
        never after: a token must be verified with the distribution from which it was drawn.
        """
        mass = float(np.exp(self.scores).sum())  # float32 is enough, since probabilities are divided by their own sum
        return TokenDistribution(self.vocab_size, self.scores - np.float32(math.log(mass)), self.ids)

    def dense_scores(self) -> Scores:
        """Return the unnormalised log-probs of the whole vocabulary, [V] float32; -inf for ids that are not stored."""
        if self.ids is None:
            return self.scores
        return _spread(self.ids, self.scores, self.vocab_size, -math.inf)

    def support(self) -> tuple[Ids, Scores]:
        """Return the ids whose probability is above 0, ascending, and their unnormalised log-probs, [M] each."""
        places = np.flatnonzero(self.scores > -math.inf)
        scores = self.scores[places]
        if self.ids is None:
            return places, scores
        return self.ids[places], scores


def one_hot(token_id: int, vocab_size: int) -> TokenDistribution:
    """Return the distribution with all its mass on one id."""
    return TokenDistribution(vocab_size, np.zeros(1, dtype=np.float32), np.array([token_id], dtype=np.int64))


def truncate_topk(distribution: TokenDistribution, n: int) -> TokenDistribution:
    """Return the distribution cut to its n most likely ids, not normalised. Raises ValueError if n is below 1.

    Call it before a draw, never after: a token must be verified with the distribution from which it was drawn.
    """
    if n < 1:
        raise ValueError(f"n is {n}, must be at least 1")
    if distribution.scores.size <= n:
        return distribution
    places = exactly_best(distribution.scores, n)
    kept = distribution.scores[places]
    if kept[kept.argmin()] == -math.inf:
        places = places[kept > -math.inf]
        kept = distribution.scores[places]
    if distribution.ids is not None:
        places = distribution.ids[places]
    return TokenDistribution(distribution.vocab_size, kept, places)


def draw_index(weights: Weights, u: float) -> int:
    """Draw an index with mass by the inverse CDF of weights [N] float64 >= 0, which need not sum to 1. u: uniform
    number in (0, 1). Raises EmptyDistribution if their sum is 0 or not finite.

        weights (2, 1, 1), u 0.6: the CDF is (2, 3, 4), and 0.6 * 4 = 2.4 falls to index 1
    """
    start = 0
    if weights.size > _CHUNK:
        chunk_cdf = np.cumsum(_chunk_sums(weights))
        total = float(chunk_cdf[-1])
        goal = u * total
        chunk = min(int(np.searchsorted(chunk_cdf, goal, side="right")), chunk_cdf.size - 1)
        if chunk:
            goal -= float(chunk_cdf[chunk - 1])
        start = chunk * _CHUNK
        weights = weights[start : start + _CHUNK]
        cdf = np.cumsum(weights)
    else:
        cdf = np.cumsum(weights)
        total = float(cdf[-1])
        goal = u * total
    if not 0.0 < total < math.inf:
        raise EmptyDistribution(f"nothing to draw from: the row sums to {total}")
    place = int(np.searchsorted(cdf, goal, side="right"))
    if place == cdf.size:  # the chunk's own sum was rounded below the goal: take the last index with mass
        place = int(np.flatnonzero(weights)[-1])
    return start + place


def _chunk_sums(weights: Weights) -> Weights:
    whole = weights.size - weights.size % _CHUNK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _CHUNK))  # half the time of `sum`
    if whole == weights.size:
        return sums
    return np.append(sums, weights[whole:].sum())


def _spread(ids: Ids, values: NDArray, size: int, fill: float = 0.0) -> NDArray:
    out = np.full(size, fill, dtype=values.dtype)
    out[ids] = values
    return out
