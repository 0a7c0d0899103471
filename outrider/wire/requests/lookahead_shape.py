"""`LookaheadShape`, the value of the setting `lookahead`: sizes of window and n-grams of lookahead decoding. Used by
settings and targets.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from outrider.wire.requests.params import MAX_DRAFT_TOKENS

SYNTAX = "W,N,G, such as 5,4,5: a window of 5 columns, n-grams of 4 tokens, 5 of them verified at once"
"""Description of the text that the setting `lookahead` takes ("W,N,G"), for errors and documents."""
_NUMBERS = re.compile(r"([0-9]{1,2}),([0-9]{1,2}),([0-9]{1,2})")
_MIN_NGRAM = 3
"""Minimum number of tokens of an n-gram. With two, a column would only have the level of the text itself, whose
continuation is known."""


class LookaheadShape(NamedTuple):
    """Sizes of the window and the n-gram pool of lookahead decoding: W, N and G of Fu et al., 2024."""

    window: int
    """W: number of columns of the window. Each column makes one n-gram per step."""
    ngram: int
    """N: number of tokens of an n-gram, including its first token, by which the pool finds it."""
    max_ngrams: int
    """G: maximum number of n-grams with the same first token that the pool keeps. A step verifies all kept n-grams
    whose first token is the last committed token."""

    @classmethod
    def parse(cls, text: str) -> LookaheadShape:
        """Parse the setting `lookahead`, a text "W,N,G" such as "5,4,5": columns of the window, tokens of an n-gram,
        and n-grams to verify per step. Raises ValueError with what is wrong.
        """
        numbers = _NUMBERS.fullmatch(text)
        if numbers is None:
            raise ValueError(f"write {SYNTAX}")
        shape = cls(*map(int, numbers.groups()))
        if shape.window < 1 or shape.ngram < _MIN_NGRAM or shape.max_ngrams < 1:
            raise ValueError(f"W and G are at least 1 and N {_MIN_NGRAM}; write {SYNTAX}")
        if shape.max_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"a step feeds up to (W + G) (N - 1) - 1 = {shape.max_nodes} tokens more with it, at most "
                f"{MAX_DRAFT_TOKENS} are allowed; lower one of them"
            )
        return shape

    @property
    def num_window_tokens(self) -> int:
        """Number of tokens of the window that a step feeds in addition to the committed tokens. (The first token of the
        window is the last committed token, and does not count.)"""
        return self.window * (self.ngram - 1) - 1

    @property
    def max_nodes(self) -> int:
        """Maximum number of tokens that a step feeds beyond the committed tokens: those of the window, and those of the
        n-grams to verify.
        """
        return self.num_window_tokens + self.max_ngrams * (self.ngram - 1)
