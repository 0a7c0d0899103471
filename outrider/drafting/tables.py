"""Laws of the next token from counts: unigrams and bigrams of a text, n-grams of the answer's own history.

The first two are the negligible-cost approximation models of Leviathan et al. 2023, section 4.1. Counts give a real
distribution, so drafts drawn from it are exact under every acceptance rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids, ascending, and how often each came, above 0. [N] each, N at least 1."""

ORDERS = (4, 3, 2)
"""Tokens of the n-grams that are counted, the longest first: it has the say where it has been seen."""
HISTORY = 512
"""Tokens of prompt and output, the last ones, that n-grams are counted over."""


class History(Protocol):
    """What a drafter knows of one sequence."""

    def next(self) -> Counts | None:
        """What may follow; None where it has nothing to say."""

    def append(self, token_id: int) -> None:
        """The sequence has gone on with it."""


class Table(Protocol):
    """A drafter without a model."""

    def begin(self, prompt_ids: Sequence[int]) -> History: ...


class Unigram:
    """How often each token comes in a text, whatever is before it."""

    def __init__(self, text_ids: Sequence[int]) -> None:
        """Raises ValueError when there is no token."""
        if not text_ids:
            raise ValueError("the text has no token; give a longer one")
        self.counts = _sorted(Counter(text_ids))

    def begin(self, prompt_ids: Sequence[int]) -> History:
        return _Constant(self.counts)


class Bigram:
    """How often each token follows the one before it in a text; what it never saw, as often as it comes at all."""

    def __init__(self, text_ids: Sequence[int]) -> None:
        """Raises ValueError when there is no token."""
        self._any = Unigram(text_ids).counts
        followers: dict[int, Counter[int]] = {}
        for one, other in pairwise(text_ids):
            followers.setdefault(one, Counter())[other] += 1
        self._after = {token_id: _sorted(counts) for token_id, counts in followers.items()}

    def after(self, token_id: int | None) -> Counts:
        return self._any if token_id is None else self._after.get(token_id, self._any)

    def begin(self, prompt_ids: Sequence[int]) -> History:
        return _Last(self, prompt_ids[-1] if prompt_ids else None)


class Ngram:
    """How often each token came after the last three, two or one, in the last tokens of the sequence itself."""

    def __init__(self, orders: Sequence[int] = ORDERS, history: int = HISTORY) -> None:
        self._orders = tuple(sorted(orders, reverse=True))
        self._history = history

    def begin(self, prompt_ids: Sequence[int]) -> History:
        made = NgramHistory(self._orders, self._history)
        for token_id in prompt_ids[-self._history :]:
            made.append(token_id)
        return made


class NgramHistory:
    def __init__(self, orders: Sequence[int], history: int) -> None:
        """orders: the longest first."""
        self._orders = orders
        self._limit = history
        self._ids: deque[int] = deque()
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def next(self) -> Counts | None:
        for order in self._orders:
            if len(self._ids) < order - 1:
                continue
            counts = self._followers.get(tuple(self._ids[i] for i in range(1 - order, 0)))
            if counts:
                return _sorted(counts)
        return None

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)
        for order in self._orders:
            if len(self._ids) >= order:
                *context, last = (self._ids[i] for i in range(-order, 0))
                counts = self._followers.setdefault(tuple(context), {})
                counts[last] = counts.get(last, 0) + 1
        if len(self._ids) > self._limit:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        for order in self._orders:
            *context, last = (self._ids[i] for i in range(order))
            counts = self._followers[tuple(context)]
            counts[last] -= 1
            if not counts[last]:
                del counts[last]
            if not counts:
                del self._followers[tuple(context)]
        self._ids.popleft()


class _Constant:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def next(self) -> Counts:
        return self._counts

    def append(self, token_id: int) -> None: ...


class _Last:
    def __init__(self, table: Bigram, last: int | None) -> None:
        self._table = table
        self._last = last

    def next(self) -> Counts:
        return self._table.after(self._last)

    def append(self, token_id: int) -> None:
        self._last = token_id


def _sorted(counts: dict[int, int]) -> Counts:
    ids = np.array(sorted(counts), dtype=np.int64)
    return ids, np.array([counts[token_id] for token_id in ids.tolist()], dtype=np.float64)
