"""What a drafter without a model is to whoever asks it: a target worker, a draft service, `outrider alpha`.

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
    """From the end of a sequence onwards. Of no use once the sequence has changed."""

    def next(self) -> Counts | None:
        """What may come here; None where there is nothing to say."""

    def step(self, token_id: int) -> None:
        """Goes on behind this guess."""


class Follower(Protocol):
    """What a drafter knows of one sequence. What it says is a function of the sequence as it now is (and, of a drafter
    that has read others, of those), however it came to be so.
    """

    @property
    def num_tokens(self) -> int:
        """Of the sequence."""

    def append(self, token_ids: Sequence[int]) -> None:
        """The sequence has gone on with these."""

    def truncate(self, num_tokens: int) -> None:
        """Cut back to its first num_tokens."""

    def walk(self) -> Walk: ...

    def has_next(self) -> bool:
        """What it says now is worth more than nothing; where a model can be asked as well, it is asked if not."""

    def close(self) -> None:
        """The sequence has ended. Who only drops a follower tells its drafter nothing of it."""


class Drafter(Protocol):
    """Of one thread, and so are its followers."""

    def open(self, token_ids: Sequence[int], num_prompt: int, cache_salt: bytes = b"") -> Follower:
        """token_ids: prompt and output so far, of which the first num_prompt are the prompt. Nothing of a sequence is
        ever shown to one of another cache_salt.
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
