"""A drafter that copies a text which the request predicts: a file before an edit, say (OpenAI's predicted outputs).

It begins at the text's beginning, copies on while the output agrees, and after that goes on where the output's last
tokens stand in the text. It watches whether what it says comes, verified or not: the more of it was wrong of late,
the more tokens must match before it says anything, so that a text of no use leaves the say to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.drafting.drafter import Counts, Followed, sorted_counts

MAX_N = 16
"""Tokens that must match, at most, for it to say anything; to go on elsewhere, two must. Doubling it leaves a text
of no use silent twice as long."""
MOST_PLACES = 256
"""Places that are compared for the longest match, from where it was last right on, and as many from the beginning.
Doubling it doubles the time that a text takes which repeats itself."""


class Prediction:
    """A predicted text. Each request has its own."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.ids = list(token_ids)
        self._ids = np.array(self.ids, dtype=np.int64)
        pairs = (self._ids[:-2] << 32) | self._ids[1:-1]  # of what is followed by something
        self._starts = np.argsort(pairs, kind="stable")
        """Positions at which pairs begin, those of equal pairs together and ascending."""
        self._pairs = pairs[self._starts]

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> PredictionFollower:
        return PredictionFollower(self, token_ids, num_prompt)

    def longest(self, tail: Sequence[int], near: int) -> tuple[int, int] | None:
        """Return the position behind the longest run of tokens that ends as `tail` does, and its length, from 2 to
        MAX_N; None without one. Of equals the first from position `near` on, else the first of all.
        """
        if len(tail) < 2:
            return None
        pair = (tail[-2] << 32) | tail[-1]
        starts = self._starts[np.searchsorted(self._pairs, pair) : np.searchsorted(self._pairs, pair, "right")]
        first = int(np.searchsorted(starts, near - 2))
        ends = np.concatenate((starts[first : first + MOST_PLACES], starts[: min(first, MOST_PLACES)])) + 2
        if not ends.size:
            return None
        length = 2
        while length < min(MAX_N, len(tail)):
            longer = ends[ends > length]
            longer = longer[self._ids[longer - 1 - length] == tail[-1 - length]]
            if not longer.size:
                break
            ends, length = longer, length + 1
        return int(ends[0]), length


class _Place(NamedTuple):
    """What is known behind a token of the output."""

    position: int
    """Of the text's token that would come next; the text's length where the output is nowhere in it."""
    num_agreed: int
    """Tokens in a row that agree up to there, the match that led there among them."""
    needed: int = 1
    """So many must, for it to say anything: doubled by each guess that did not come, less by one for each that did."""
    heard: int = 0
    """Position behind the last guess that came."""
    came: bool | None = None
    """Whether the token before it had been guessed; None where nothing had been said."""


class PredictionFollower(Followed):
    """Follows an output along the text."""

    def __init__(self, text: Prediction, token_ids: Sequence[int], num_prompt: int) -> None:
        super().__init__(token_ids[:num_prompt])
        self._text = text
        self._num_prompt = num_prompt
        self._places = [_Place(0, 1)]
        """Behind the prompt, and behind each token of the output."""
        self.append(token_ids[num_prompt:])

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.ids.append(token_id)
            if len(self.ids) > self._num_prompt:
                self._places.append(self._after(self._places[-1], token_id))

    def truncate(self, num_tokens: int) -> None:
        super().truncate(num_tokens)
        del self._places[max(0, num_tokens - self._num_prompt) + 1 :]

    def walk(self) -> PredictionWalk:
        return PredictionWalk(self._text.ids, self._places[-1].position if self.has_next() else len(self._text.ids))

    def has_next(self) -> bool:
        return self._says(self._places[-1])

    def outcomes(self, num_tokens: int) -> list[bool]:
        """Return, of what it had to say before each of the last num_tokens tokens of the output, whether it came."""
        places = self._places[max(1, len(self._places) - num_tokens) :]
        return [place.came for place in places if place.came is not None]

    def _says(self, place: _Place) -> bool:
        return place.num_agreed >= place.needed and place.position < len(self._text.ids)

    def _after(self, place: _Place, token_id: int) -> _Place:
        agrees = self._text.ids[place.position : place.position + 1] == [token_id]
        came = agrees if self._says(place) else None
        needed, heard = place.needed, place.heard
        if came:
            needed, heard = max(1, needed - 1), place.position + 1
        elif came is False:
            needed = min(MAX_N, 2 * needed)
        if agrees:
            return _Place(place.position + 1, place.num_agreed + 1, needed, heard, came)
        tail = self.ids[max(self._num_prompt, len(self.ids) - MAX_N) :]
        position, num_agreed = self._text.longest(tail, heard) or (len(self._text.ids), 0)
        return _Place(position, num_agreed, needed, heard, came)


class PredictionWalk:
    """Copies on from one place to the text's end."""

    def __init__(self, ids: Sequence[int], position: int) -> None:
        self._ids = ids
        self._position = position

    def next(self) -> Counts | None:
        return sorted_counts({self._ids[self._position]: 1}) if self._position < len(self._ids) else None

    def step(self, token_id: int) -> None:
        is_copy = self._ids[self._position : self._position + 1] == [token_id]
        self._position = self._position + 1 if is_copy else len(self._ids)
