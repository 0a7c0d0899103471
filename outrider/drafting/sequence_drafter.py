"""The protocols of a drafter without a model. Targets, drafts and `outrider alpha` use such drafters through them.

A drafter opens a follower for each sequence. To propose tokens, the follower returns a walk, which starts at the
sequence's end and continues over its own draft tokens. A walk does not change the follower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.float64]]
"""(token ids [N] in ascending order, their counts [N]). All counts are above 0, and N is at least 1. Divided by their
sum, counts are a distribution."""


class ChainWalk(Protocol):
    """Proposals for a chain of draft tokens after the end of a sequence; invalid once the sequence changes."""

    def next(self) -> Counts | None:
        """Return the token ids that may come next, with their counts; None = the drafter has no proposal here."""

    def step(self, token_id: int) -> None:
        """Move on by one draft token: `next` then returns what may come after it."""


class Follower(Protocol):
    """State of a drafter for one sequence, whose end may grow and shrink.

    The draft tokens depend only on the sequence's present tokens, not on earlier changes of the sequence. A drafter
    that learns, such as Lookup, also proposes tokens of other sequences that have ended.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, in tokens."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def truncate(self, num_tokens: int) -> None:
        """Truncate the sequence to its first `num_tokens` tokens."""

    def walk(self) -> ChainWalk:
        """Return the proposals for a chain of draft tokens after the end of the sequence."""

    def has_next(self) -> bool:
        """Return whether draft tokens after the sequence's end are likely enough to be worth verifying."""

    def close(self) -> None:
        """End the sequence, so that the drafter may learn from it; without this call it learns nothing."""


class SequenceDrafter(Protocol):
    """A drafter without a model. `open` returns its state for one sequence, a `Follower`. The drafter and its followers
    belong to one thread.
    """

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> Follower:
        """Return the drafter's state for a sequence of a prompt and the output so far. The first `num_prompt` tokens
        are the prompt.

        What the drafter learns from an ended sequence is used only for sequences with the same `corpus_id`. With an
        empty `corpus_id` nothing is learnt or used.
        """


class TokenSequence:
    """Sequence of token ids that grows and shrinks at its end. Base class of followers (drafters' states)."""

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
    """Convert counts by token id to two arrays: the ids in ascending order, and the count of each."""
    ids = np.array(sorted(counts), dtype=np.int64)
    return ids, np.array([counts[token_id] for token_id in ids.tolist()], dtype=np.float64)
