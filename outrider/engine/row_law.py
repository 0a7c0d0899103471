"""The law of one token on the host: which ids can come, and with what probability. NumPy.

Both workers draw from it, the draft ships it and the target reads what was shipped into it. Its probabilities are the
float64 exponentials of its float32 scores over their sum, whatever the scores add up to: they alone decide a draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outrider.engine.candidates import Ids, Scores, Weights, exactly_best

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
