"""The window of lookahead decoding and the n-grams made in it, as users write them. Imports no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from outrider.wire.requests.params import MAX_DRAFT_TOKENS

FORM = "W,N,G, such as 5,4,5: a window of 5 columns, n-grams of 4 tokens, 5 of them verified at once"
_NUMBERS = re.compile(r"([0-9]{1,2}),([0-9]{1,2}),([0-9]{1,2})")
_LEAST_NGRAM = 3
"""Tokens: with two a column is as deep as the text itself, which says what follows it."""


class LookaheadShape(NamedTuple):
    """Fu et al., 2024: W, N and G."""

    window: int
    """Columns, each of which makes an n-gram a step."""
    ngram: int
    """Tokens of an n-gram."""
    guesses: int
    """Most n-grams kept that begin with the same token: so many are verified at once."""

    @classmethod
    def parse(cls, text: str) -> LookaheadShape:
        """Raises ValueError saying what is wrong."""
        numbers = _NUMBERS.fullmatch(text)
        if numbers is None:
            raise ValueError(f"write {FORM}")
        shape = cls(*map(int, numbers.groups()))
        if shape.window < 1 or shape.ngram < _LEAST_NGRAM or shape.guesses < 1:
            raise ValueError(f"W and G are at least 1 and N {_LEAST_NGRAM}; write {FORM}")
        if shape.most_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"a step feeds up to (W + G) (N - 1) - 1 = {shape.most_nodes} tokens more with it, at most "
                f"{MAX_DRAFT_TOKENS} are allowed; lower one of them"
            )
        return shape

    @property
    def num_window_tokens(self) -> int:
        """Return the tokens of the window, of which the last committed one is the first and fed anyway."""
        return self.window * (self.ngram - 1) - 1

    @property
    def most_nodes(self) -> int:
        """Return the most tokens that a step feeds besides the committed ones."""
        return self.num_window_tokens + self.guesses * (self.ngram - 1)
