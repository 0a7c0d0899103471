"""Drafters that count a text: how often each token occurs in it, and how often after which other token.

They are the negligible-cost approximation models of Leviathan et al. 2023, section 4.1. Counts give a real
distribution, so draft tokens sampled from it are exact under every acceptance rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from outrider.drafting.sequence_drafter import Counts, TokenSequence, sorted_counts


class Unigram:
    """Drafter that proposes tokens by how often they occur in a text, whatever precedes them."""

    def __init__(self, text_ids: Sequence[int]) -> None:
        """Count the tokens of a text. Raises ValueError if the text is empty."""
        if not text_ids:
            raise ValueError("the text has no token; give a longer one")
        self.counts = sorted_counts(Counter(text_ids))
        self._after: dict[int, Counts] = {}

    def after(self, token_id: int) -> Counts:
        return self._after.get(token_id, self.counts)

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> LastTokenFollower:
        return LastTokenFollower(self, token_ids)


class Bigram(Unigram):
    """Drafter that proposes tokens by how often they follow the previous token in a text. After a token that is not in
    the text, it proposes tokens by how often they occur in the text at all.
    """

    def __init__(self, text_ids: Sequence[int]) -> None:
        """Count the pairs of tokens of a text. Raises ValueError if the text is empty."""
        super().__init__(text_ids)
        following = defaultdict[int, Counter[int]](Counter)
        for one, other in pairwise(text_ids):
            following[one][other] += 1
        for token_id, counts in following.items():
            self._after[token_id] = sorted_counts(counts)


class LastTokenFollower(TokenSequence):
    """State of a Unigram or Bigram drafter for one sequence. It proposes by the table's counts after the sequence's
    last token, so `walk`, which proposes a chain, copies only that token.
    """

    def __init__(self, table: Unigram, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self._table = table

    def has_next(self) -> bool:
        return True

    def walk(self) -> LastTokenFollower:
        return LastTokenFollower(self._table, self.ids[-1:])

    def next(self) -> Counts:
        return self._table.after(self.ids[-1])

    def step(self, token_id: int) -> None:
        self.ids.append(token_id)
