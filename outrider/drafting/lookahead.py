"""Lookahead decoding (Fu et al., 2024, 2402.02057): n-grams that a model writes beside its text, as guesses of it.

A window of W columns hangs under the last token, column i at i tokens' distance, N - 1 tokens deep. It is fed with each
step, and what the model says most likely after each column is its N-th token: N tokens that the model might say in a
row, made in N - 1 steps (Jacobi iteration). They go to a pool; the window moves on by a token. Of the pool, those that
begin with the text's last token say what may follow it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from random import Random

from outrider.wire.lookahead_shape import LookaheadShape

MOST_STARTS = 1024
"""First tokens of n-grams that are kept; those of the one that was met longest ago are let go. Doubling it doubles what
an answer may take, about 500 bytes for each with G = 5."""


class Lookahead:
    """The window and the pool of one sequence. Neither knows a position: what is committed otherwise than it seemed
    leaves both of use.
    """

    def __init__(self, shape: LookaheadShape, token_ids: Sequence[int]) -> None:
        """Begin with any of these tokens: the sequence's, and what an encoder reads."""
        self.shape = shape
        some_ids = Random(len(token_ids)).choices(token_ids, k=shape.num_scaffolds)
        ends = range(shape.window - 1, shape.num_scaffolds + 1, shape.window)
        self._levels = [some_ids[max(0, end - shape.window) : end] for end in ends]
        """By depth, the window's tokens by column; the first column's first is the sequence's last token, and not
        here."""
        self._pool: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()
        """By first token, what follows it in n-grams, the latest last."""

    @property
    def ids(self) -> list[int]:
        """Return the window's tokens, level by level: what is fed with the sequence's last token."""
        return list(chain.from_iterable(self._levels))

    @property
    def parents(self) -> list[int]:
        """Return, for each of `ids`, the index of the one that it follows: on the first level the one in the column
        before, else the one above; -1 for the sequence's last token.
        """
        window, num_ids = self.shape.window, self.shape.num_scaffolds
        return [*range(-1, window - 2), *range(-1, window - 1), *range(window - 1, num_ids - window)]

    def learn(self, last_id: int, new_ids: Sequence[int]) -> None:
        """Take what the model says after the last of `ids`, of each column in order, and move on by a token. last_id:
        the token that the window hung under.
        """
        first, *deeper = self._levels
        for start, *following in zip((last_id, *first), *deeper, new_ids, strict=True):
            self._keep(start, tuple(following))
        self._levels = [deeper[0][1:], *deeper[1:], list(new_ids)]

    def _keep(self, start: int, following: tuple[int, ...]) -> None:
        known = self._pool.setdefault(start, {})
        known.pop(following, None)
        known[following] = None
        if len(known) > self.shape.guesses:
            del known[next(iter(known))]
        self._pool.move_to_end(start)
        if len(self._pool) > MOST_STARTS:
            self._pool.popitem(last=False)

    def guesses(self, last_id: int) -> list[tuple[int, ...]]:
        """Return what may follow the token, N - 1 ids each, the latest first; none where no n-gram begins with it."""
        return list(reversed(self._pool.get(last_id, {})))
