"""An index that finds earlier occurrences of the last tokens of a sequence. It grows and shrinks with the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_OCCURRENCES = 32
"""Maximum number of earlier occurrences of a sequence's last `min_n` tokens that are compared for the longest match;
the latest ones are taken. It bounds the time of a search in repetitive text."""


@dataclass(frozen=True, slots=True)
class Match:
    """Occurrence of a sequence's last tokens in a SuffixIndex."""

    end: int
    """Position in the index after the match. The token there is the continuation."""
    length: int
    """Length of the match, in tokens, at most the index's `max_n`."""


class SuffixIndex:
    """Index of a sequence of tokens. For every `min_n` consecutive tokens it finds their latest occurrence, and from
    there the earlier ones.

    A None in the sequence separates two texts, and no match spans it. Positions are counted from the first token ever
    added, so that they stay valid when tokens at the front are dropped.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        """`min_n`, `max_n`: minimum and maximum length of a match, in tokens; 1 <= min_n <= max_n."""
        self._min_n = min_n
        self._max_n = max_n
        self._ids: list[int | None] = []
        self._first = 0
        """Position of the first token that is kept."""
        self._last: dict[tuple[int | None, ...], int] = {}
        """Maps `min_n` consecutive tokens to the position after their latest occurrence."""
        self._earlier: list[int | None] = []
        """For each token, the position after the previous occurrence of the `min_n` tokens that end with it."""

    @property
    def end(self) -> int:
        """Position after the last token of the sequence."""
        return self._first + len(self._ids)

    @property
    def is_empty(self) -> bool:
        return not self._ids

    def last(self, count: int) -> list[int | None]:
        """Return the last `count` tokens of the sequence, or all tokens of a shorter one. None stands between two
        texts.
        """
        return self._ids[max(0, len(self._ids) - count) :]

    def at(self, position: int) -> int | None:
        """Return the token at a position, counted from the first ever added; None = two texts meet, or none is kept."""
        if not self._first <= position < self.end:
            return None
        return self._ids[position - self._first]

    def append(self, token_id: int | None) -> None:
        self._ids.append(token_id)
        key = self._key(self.end)
        if key is None:
            self._earlier.append(None)
        else:
            self._earlier.append(self._last.get(key))
            self._last[key] = self.end

    def pop(self) -> None:
        """Remove the last token."""
        key = self._key(self.end)
        earlier = self._earlier.pop()
        if key is not None and earlier is not None:
            self._last[key] = earlier
        elif key is not None:
            del self._last[key]
        self._ids.pop()

    def drop(self, count: int) -> None:
        """Remove the first `count` tokens of the sequence. Matches that begin in them are no longer found."""
        for end in range(self._first + 1, min(self._first + count + self._min_n, self.end + 1)):
            key = self._key(end)
            if key is not None and self._last.get(key) == end:
                del self._last[key]
        del self._ids[:count]
        del self._earlier[:count]
        self._first += count

    def longest(self, tail: Sequence[int | None]) -> Match | None:
        """Search the sequence for the longest match with the end of `tail`; of equally long matches return the latest.
        Only the latest MAX_OCCURRENCES occurrences of the last `min_n` tokens of `tail` are compared. A match must have
        a token after it in the sequence. None = there is no match.

        `tail`: last tokens of a sequence, at least `max_n` or all of them.
        """
        if len(tail) < self._min_n:
            return None
        best: Match | None = None
        end = self._last.get(tuple(tail[-self._min_n :]))
        for _ in range(MAX_OCCURRENCES):
            if end is None or end - self._min_n < self._first:
                break
            if self.at(end) is not None:
                length = self._length(end, tail)
                if best is None or length > best.length:
                    best = Match(end, length)
                if length == self._max_n:
                    break
            end = self._earlier[end - self._first - 1]
        return best

    def _length(self, end: int, tail: Sequence[int | None]) -> int:
        length = self._min_n
        max_length = min(self._max_n, len(tail), end - self._first)
        while length < max_length and self._ids[end - self._first - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _key(self, end: int) -> tuple[int | None, ...] | None:
        # The `min_n` tokens before `end`; None where there are fewer, or a separator is among them.
        start = end - self._first - self._min_n
        if start < 0:
            return None
        key = tuple(self._ids[start : start + self._min_n])
        if None in key:
            return None
        return key
