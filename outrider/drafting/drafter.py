"""The protocols of a drafter without a model, as a target worker, a draft service and `outrider alpha` use it.

A drafter is opened for a sequence and follows it there. To propose, a walk goes ahead over its own guesses, which
change nothing of what is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids, ascending, and how often each came, above 0. [N] each, N at least 1."""


class Walk(Protocol):
    """Guesses from the end of a sequence onwards. It is of no use once the sequence has changed."""

    def next(self) -> Counts | None:
        """Return what may come here, with counts, or None where nothing is known."""

    def step(self, token_id: int) -> None:
        """Go on behind this guess."""


class Follower(Protocol):
    """A drafter's knowledge of one sequence. Its guesses depend on the sequence as it now is (and, for a drafter that
    has read others, on those), however it came to be so.
    """

    @property
    def num_tokens(self) -> int:
        """Return the length of the sequence, in tokens."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of the sequence."""

    def truncate(self, num_tokens: int) -> None:
        """Cut the sequence back to its first num_tokens."""

    def walk(self) -> Walk: ...

    def has_next(self) -> bool:
        """Return whether a draft token from here is worth verifying."""

    def close(self) -> None:
        """End the sequence, from which the drafter may learn. A follower that is only dropped teaches it nothing."""


class SequenceDrafter(Protocol):
    """Opens followers. It and they belong to one thread."""

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> Follower:
        """Follow a sequence: prompt and output so far, of which the first num_prompt tokens are the prompt. What is
        learnt from an ended sequence is used for those with the same corpus_id alone; with an empty one nothing is
        learnt, and nothing used.
        """


class Followed:
    """A sequence that is added to at its end and cut back there."""

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
    ids = np.array(sorted(counts), dtype=np.int64)
    return ids, np.array([counts[token_id] for token_id in ids.tolist()], dtype=np.float64)
