"""The drafter `ngram`, which counts which tokens followed the sequence's last tokens earlier in the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.sequence_drafter import Counts, TokenSequence, sorted_counts

ORDERS = (4, 3, 2)
"""Lengths of the counted n-grams, in tokens, the longest first. The longest n-grams whose first tokens are the
sequence's last ones propose the next draft token."""
HISTORY = 512
"""Number of last tokens of the sequence (prompt and output) in which n-grams are counted."""


class Ngram:
    """Drafter that proposes the tokens that most often followed the last three tokens, or else the last two or one, in
    the recent part of the sequence.
    """

    def __init__(self, orders: Sequence[int] = ORDERS, history: int = HISTORY) -> None:
        """`orders`: lengths of the n-grams to count, each from 2 to `history`. `history`: number of last tokens of the
        sequence in which they are counted.
        """
        self._orders = tuple(sorted(orders, reverse=True))
        self._history = history

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> NgramFollower:
        return NgramFollower(token_ids, self._orders, self._history)


class NgramFollower(TokenSequence):
    """State of the drafter Ngram for one sequence: counts of the n-grams in its last `history` tokens. Adding or
    removing a token of the sequence changes at most two counts per n-gram length.
    """

    def __init__(self, token_ids: Sequence[int], orders: Sequence[int], history: int) -> None:
        """Follow a sequence. `orders`: lengths of the n-grams, the longest first. `history`: see `Ngram`."""
        super().__init__(())
        self._orders = orders
        self._history = history
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        num_uncounted = max(0, len(token_ids) - history)
        self.ids.extend(token_ids[:num_uncounted])
        self._start = num_uncounted
        """Position of the first token that is counted: `history` tokens before the sequence's end, or 0."""
        self.append(token_ids[num_uncounted:])

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.ids.append(token_id)
            self._count_last(1)
            if len(self.ids) - self._start > self._history:
                self._count_first(-1)
                self._start += 1

    def truncate(self, num_tokens: int) -> None:
        while len(self.ids) > num_tokens:
            self._count_last(-1)
            self.ids.pop()
            if self._start and len(self.ids) - self._start < self._history:
                self._start -= 1
                self._count_first(1)

    def walk(self) -> NgramWalk:
        num_needed = self._orders[0] - 1  # tokens before the last of the longest n-gram
        last_ids = self.ids[max(self._start, len(self.ids) - num_needed) :]
        return NgramWalk(self._followers, self._orders, last_ids)

    def has_next(self) -> bool:
        """Return whether the sequence's last two tokens also occur together earlier among its last `history` tokens. If
        no n-grams of three or more tokens are counted, an earlier occurrence of the last token is enough.
        """
        min_context = min(2, self._orders[0] - 1)
        num_counted = len(self.ids) - self._start
        for order in self._orders:
            num_context = order - 1
            if not min_context <= num_context <= num_counted:
                continue
            if tuple(self.ids[len(self.ids) - num_context :]) in self._followers:
                return True
        return False

    def _count_last(self, by: int) -> None:
        end = len(self.ids)
        for order in self._orders:
            if end - order >= self._start:
                self._count(end - order, order, by)

    def _count_first(self, by: int) -> None:
        for order in self._orders:
            if self._start + order <= len(self.ids):
                self._count(self._start, order, by)

    def _count(self, start: int, order: int, by: int) -> None:
        context = tuple(self.ids[start : start + order - 1])
        last = self.ids[start + order - 1]
        counts = self._followers.setdefault(context, {})
        counts[last] = counts.get(last, 0) + by
        if not counts[last]:
            del counts[last]
            if not counts:
                del self._followers[context]


class NgramWalk:
    """Chain of draft tokens from the n-gram counts of a sequence. The draft tokens do not change the counts."""

    def __init__(
        self, followers: dict[tuple[int, ...], dict[int, int]], orders: Sequence[int], last_ids: list[int]
    ) -> None:
        """`followers`: by n-gram without its last token, the counts of the tokens that followed. `orders`: lengths of
        the n-grams, the longest first. `last_ids`: the sequence's last tokens, one fewer than the longest n-gram, or
        all of a shorter sequence.
        """
        self._followers = followers
        self._orders = orders
        self._last_ids = last_ids

    def next(self) -> Counts | None:
        for order in self._orders:
            if len(self._last_ids) >= order - 1:
                counts = self._followers.get(tuple(self._last_ids[1 - order :]))
                if counts:
                    return sorted_counts(counts)
        return None

    def step(self, token_id: int) -> None:
        self._last_ids = [*self._last_ids, token_id][1 - self._orders[0] :]
