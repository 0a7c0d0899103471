"""The protocols of a drafter without a model, as a target worker, a draft service and `outrider alpha` use it.

A drafter opens a follower for a sequence. To propose tokens, a walk continues from the sequence's end over its own
draft tokens, without changing the follower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids [N] in ascending order, and their counts [N], each above 0. N is at least 1."""


class ChainWalk(Protocol):
    """Draft tokens from the end of a sequence onwards. A walk is invalid once the sequence has changed."""

    def next(self) -> Counts | None:
        """Return the ids that may come next, with counts; None where none is known."""

    def step(self, token_id: int) -> None:
        """Continue after this draft token."""


class Follower(Protocol):
    """State of a drafter for one sequence.

    Its draft tokens depend on the sequence alone, however it came to be so, and on other sequences for a drafter that
    learns from them.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, in tokens."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def truncate(self, num_tokens: int) -> None:
        """Truncate the sequence to its first `num_tokens` tokens."""

    def walk(self) -> ChainWalk:
        """Return a walk from the end of the sequence."""

    def has_next(self) -> bool:
        """Return whether a draft token from here is worth verifying."""

    def close(self) -> None:
        """End the sequence; the drafter may learn from it. It learns nothing from a follower that is only dropped."""


class SequenceDrafter(Protocol):
    """A drafter without a model, which opens followers. The drafter and its followers belong to one thread."""

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> Follower:
        """Follow a sequence of prompt and output so far, of which the first `num_prompt` tokens are the prompt.

        What is learnt from an ended sequence is used for sequences with the same `corpus_id` alone. With an empty one
        nothing is learnt or used.
        """


class TokenSequence:
    """A sequence that grows and shrinks at its end."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.ids = list(token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def append(self, token_ids: Sequence[int]) -> None:
        self.ids.extend(token_ids)

    def truncate(self, num_tokens: int) -> None:
        del self.ids[num_tokens:]

    def close(self) -> None: ...


def sorted_counts(counts: dict[int, int]) -> Counts:
    """Return the counts of token ids as arrays, by ascending id."""
    ids = np.array(sorted(counts), dtype=np.int64)
    return ids, np.array([counts[token_id] for token_id in ids.tolist()], dtype=np.float64)
