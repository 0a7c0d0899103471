"""Where the last tokens of a sequence came before: an index that grows with it, and shrinks at either end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PLACES = 32
"""Places, the latest ones, that are looked at for the longest match."""


@dataclass(frozen=True, slots=True)
class Match:
    end: int
    """Position behind it: the token there is what followed."""
    length: int
    """Tokens, at most the longest that is looked for."""


class SuffixIndex:
    """Tokens in order, and of every `min_n` of them in a row where they came before. None parts texts: no match goes
    across. Positions keep their meaning when tokens at the front are dropped.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        """1 <= min_n <= max_n: the shortest and the longest match that counts."""
        self._min_n = min_n
        self._max_n = max_n
        self._ids: list[int | None] = []
        self._first = 0
        """Position of the first that is left."""
        self._last: dict[tuple[int | None, ...], int] = {}
        """Ends of the latest ones of min_n tokens in a row."""
        self._earlier: list[int | None] = []
        """Of each token: the end before it of the same min_n tokens."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self._first + len(self._ids)

    @property
    def num_keys(self) -> int:
        """Different runs of min_n tokens that can be found."""
        return len(self._last)

    @property
    def is_empty(self) -> bool:
        return not self._ids

    def last(self, count: int) -> list[int | None]:
        """The last `count` tokens, or all there are."""
        return self._ids[max(0, len(self._ids) - count) :]

    def at(self, position: int) -> int | None:
        """The token there; None between texts, and where there is none."""
        return self._ids[position - self._first] if self._first <= position < self.end else None

    def append(self, token_id: int | None) -> None:
        self._ids.append(token_id)
        key = self._key(self.end)
        if key is None:
            self._earlier.append(None)
        else:
            self._earlier.append(self._last.get(key))
            self._last[key] = self.end

    def pop(self) -> None:
        """The last token goes."""
        key, earlier = self._key(self.end), self._earlier.pop()
        if key is not None and earlier is not None:
            self._last[key] = earlier
        elif key is not None:
            del self._last[key]
        self._ids.pop()

    def drop(self, count: int) -> None:
        """The first `count` tokens go; what began in them is found no more."""
        for end in range(self._first + 1, min(self._first + count + self._min_n, self.end + 1)):
            key = self._key(end)
            if key is not None and self._last.get(key) == end:
                del self._last[key]
        del self._ids[:count], self._earlier[:count]
        self._first += count

    def longest(self, tail: Sequence[int | None]) -> Match | None:
        """The longest of the latest places that end as `tail` does and have a token behind them, the latest of equals.
        tail: at least max_n tokens, or all there are.
        """
        best: Match | None = None
        end = self._last.get(tuple(tail[-self._min_n :])) if len(tail) >= self._min_n else None
        for _ in range(MOST_PLACES):
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
        length, most = self._min_n, min(self._max_n, len(tail), end - self._first)
        while length < most and self._ids[end - self._first - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _key(self, end: int) -> tuple[int | None, ...] | None:
        """The min_n tokens that end there; None where there are not so many, or texts part."""
        start = end - self._first - self._min_n
        key = tuple(self._ids[start : start + self._min_n]) if start >= 0 else ()
        return None if not key or None in key else key
