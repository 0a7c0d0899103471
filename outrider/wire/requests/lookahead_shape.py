"""`LookaheadShape`: window and n-grams of lookahead decoding, as the setting has them. Used by settings and targets."""

from __future__ import annotations

import re
from typing import NamedTuple

from outrider.wire.requests.params import MAX_DRAFT_TOKENS

FORM = "W,N,G, such as 5,4,5: a window of 5 columns, n-grams of 4 tokens, 5 of them verified at once"
"""How errors and documents describe the setting."""
_NUMBERS = re.compile(r"([0-9]{1,2}),([0-9]{1,2}),([0-9]{1,2})")
_MIN_NGRAM = 3
"""Tokens of an n-gram. With two a column would be as deep as the text itself, whose continuation is known."""


class LookaheadShape(NamedTuple):
    """Sizes of window and pool of lookahead decoding: W, N and G of Fu et al., 2024."""

    window: int
    """W: columns of the window, each of which makes one n-gram a step."""
    ngram: int
    """N: tokens of an n-gram."""
    guesses: int
    """G: n-grams of the pool that begin with the same token, all of which a step verifies."""

    @classmethod
    def parse(cls, text: str) -> LookaheadShape:
        """Parse W,N,G. Raises ValueError with what is wrong."""
        numbers = _NUMBERS.fullmatch(text)
        if numbers is None:
            raise ValueError(f"write {FORM}")
        shape = cls(*map(int, numbers.groups()))
        if shape.window < 1 or shape.ngram < _MIN_NGRAM or shape.guesses < 1:
            raise ValueError(f"W and G are at least 1 and N {_MIN_NGRAM}; write {FORM}")
        if shape.most_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"a step feeds up to (W + G) (N - 1) - 1 = {shape.most_nodes} tokens more with it, at most "
                f"{MAX_DRAFT_TOKENS} are allowed; lower one of them"
            )
        return shape

    @property
    def num_window_tokens(self) -> int:
        """Tokens of the window that a step feeds besides the committed ones. (The window's first token is the last
        committed one.)"""
        return self.window * (self.ngram - 1) - 1

    @property
    def most_nodes(self) -> int:
        """Most tokens that a step feeds besides the committed ones: window and n-grams to verify."""
        return self.num_window_tokens + self.guesses * (self.ngram - 1)
