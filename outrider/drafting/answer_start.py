"""A wrapper for drafters that copy from the prompt. It keeps them from proposing a special token of the chat template
as the first token of an output.

A chat prompt ends with tokens of the chat template that also stand before earlier messages of the prompt. What followed
them there, such as the special token of another turn, does not begin an answer.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from outrider.drafting.sequence_drafter import ChainWalk, Counts, Follower, SequenceDrafter


class AnswerStart:
    """Drafter that wraps another drafter, so that no special token is proposed as the first token of an output."""

    def __init__(self, drafter: SequenceDrafter, special_ids: Set[int]) -> None:
        """Wrap a drafter. `special_ids`: ids of the tokenizer's special tokens."""
        self._drafter = drafter
        self._special_ids = np.array(sorted(special_ids), dtype=np.int64)

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> Follower:
        return AnswerFollower(self._drafter.open(token_ids, num_prompt, corpus_id), num_prompt, self._special_ids)


class AnswerFollower:
    """State, for one sequence, of a drafter that proposes no special token as the first token of an output."""

    def __init__(self, follower: Follower, num_prompt: int, special_ids: np.ndarray) -> None:
        self._follower = follower
        self._num_prompt = num_prompt
        self._special_ids = special_ids
        self.append = follower.append
        self.truncate = follower.truncate
        self.close = follower.close

    @property
    def num_tokens(self) -> int:
        return self._follower.num_tokens

    def walk(self) -> ChainWalk:
        walk = self._follower.walk()
        if self._is_at_start:
            return _TextWalk(walk, self._special_ids)
        return walk

    def has_next(self) -> bool:
        if not self._follower.has_next():
            return False
        return not self._is_at_start or self.walk().next() is not None

    @property
    def _is_at_start(self) -> bool:
        return self._follower.num_tokens == self._num_prompt


class _TextWalk:
    def __init__(self, walk: ChainWalk, special_ids: np.ndarray) -> None:
        self._walk = walk
        self._special_ids = special_ids

    def next(self) -> Counts | None:
        counts = self._walk.next()
        if counts is None:
            return None
        ids, times = counts
        is_text = ~np.isin(ids, self._special_ids)
        if not is_text.any():
            return None
        return ids[is_text], times[is_text]

    def step(self, token_id: int) -> None:
        self._walk.step(token_id)
