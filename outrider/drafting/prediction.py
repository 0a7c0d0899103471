"""The drafter `prediction`, which copies the request's prediction: a text that the output may resemble, such as a file
before an edit (OpenAI's predicted outputs).

It starts at the beginning of the prediction and copies as long as the output agrees. After a mismatch it continues
where the output's last tokens occur in the prediction. It compares its draft tokens with the output, whether they were
verified or not. The more of the latest ones were wrong, the more tokens must match before it proposes again, so that a
useless prediction leaves the proposals to other drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.drafting.sequence_drafter import Counts, TokenSequence, sorted_counts

MAX_N = 16
"""Maximum number of consecutive output tokens that must agree with the prediction before the next draft token is
proposed. The number is 1 at an output's start; each wrong draft token doubles it, and each right one lowers it by one.
MAX_N is also the maximum length of a match, in tokens."""
MAX_OCCURRENCES = 256
"""Maximum number of occurrences of the output's last two tokens in the prediction that are compared for the longest
match: this many after the last correct draft token, and this many from the start of the prediction."""


class Prediction:
    """Drafter that copies one request's prediction, given as token ids."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.ids = list(token_ids)
        self._ids = np.array(self.ids, dtype=np.int64)
        pairs = (self._ids[:-2] << 32) | self._ids[1:-1]  # of tokens that another follows
        self._starts = np.argsort(pairs, kind="stable")
        """Positions in the prediction at which pairs of tokens begin, sorted by pair; those of equal pairs ascend."""
        self._pairs = pairs[self._starts]

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> PredictionFollower:
        return PredictionFollower(self, token_ids, num_prompt)

    def longest(self, tail: Sequence[int], near: int) -> tuple[int, int] | None:
        """Search the prediction for the longest match with the end of `tail`, the output's last tokens. Return
        (position after the match, its length), with a length from 2 to `MAX_N`. None = not even the last two tokens
        occur.

        Of equally long matches, the first that ends at position `near` of the prediction or later counts; without one,
        the first.
        """
        if len(tail) < 2:
            return None
        pair = (tail[-2] << 32) | tail[-1]
        begin = np.searchsorted(self._pairs, pair)
        end = np.searchsorted(self._pairs, pair, "right")
        starts = self._starts[begin:end]
        first = int(np.searchsorted(starts, near - 2))
        from_near = starts[first : first + MAX_OCCURRENCES]
        from_beginning = starts[: min(first, MAX_OCCURRENCES)]
        ends = np.concatenate((from_near, from_beginning)) + 2
        if not ends.size:
            return None
        length = 2
        while length < min(MAX_N, len(tail)):
            longer = ends[ends > length]
            longer = longer[self._ids[longer - 1 - length] == tail[-1 - length]]
            if not longer.size:
                break
            ends = longer
            length += 1
        return int(ends[0]), length


class _State(NamedTuple):
    """State of the follower after one token of the output."""

    position: int
    """Position in the prediction of the token that is expected next. It is the prediction's length if the output's last
    tokens do not occur in the prediction."""
    num_agreed: int
    """Number of the output's last tokens that equal those before `position` in the prediction, as far as they were
    compared; one more while the output agrees from its start."""
    num_needed: int = 1
    """Number of consecutive output tokens that must agree with the prediction before a draft token is proposed. Each
    wrong draft token doubles it, up to MAX_N; each correct one lowers it by one."""
    confirmed_end: int = 0
    """Position in the prediction after the last correct draft token."""
    was_correct: bool | None = None
    """Whether the draft token that was proposed for the output's last token was correct; None = there was none."""


class PredictionFollower(TokenSequence):
    """State of the drafter Prediction for one output: the position in the prediction that the output has reached."""

    def __init__(self, text: Prediction, token_ids: Sequence[int], num_prompt: int) -> None:
        super().__init__(token_ids[:num_prompt])
        self._text = text
        self._num_prompt = num_prompt
        self._states = [_State(0, 1)]
        """State after the prompt, then the state after each token of the output."""
        self.append(token_ids[num_prompt:])

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.ids.append(token_id)
            if len(self.ids) > self._num_prompt:
                self._states.append(self._next_state(self._states[-1], token_id))

    def truncate(self, num_tokens: int) -> None:
        super().truncate(num_tokens)
        del self._states[max(0, num_tokens - self._num_prompt) + 1 :]

    def walk(self) -> PredictionWalk:
        position = len(self._text.ids)
        if self.has_next():
            position = self._states[-1].position
        return PredictionWalk(self._text.ids, position)

    def has_next(self) -> bool:
        return self._proposes(self._states[-1])

    def outcomes(self, num_tokens: int) -> list[bool]:
        """Return whether each draft token that was proposed for one of the last `num_tokens` output tokens was right,
        in the order of the output. Output tokens without a draft token have no entry.
        """
        states = self._states[max(1, len(self._states) - num_tokens) :]
        return [state.was_correct for state in states if state.was_correct is not None]

    def _proposes(self, state: _State) -> bool:
        return state.num_agreed >= state.num_needed and state.position < len(self._text.ids)

    def _next_state(self, state: _State, token_id: int) -> _State:
        agrees = self._text.ids[state.position : state.position + 1] == [token_id]
        num_needed = state.num_needed
        confirmed_end = state.confirmed_end
        was_correct: bool | None = None
        if self._proposes(state):
            was_correct = agrees
            if agrees:
                num_needed = max(1, num_needed - 1)
                confirmed_end = state.position + 1
            else:
                num_needed = min(MAX_N, 2 * num_needed)
        if agrees:
            return _State(state.position + 1, state.num_agreed + 1, num_needed, confirmed_end, was_correct)
        tail = self.ids[max(self._num_prompt, len(self.ids) - MAX_N) :]
        position, num_agreed = self._text.longest(tail, confirmed_end) or (len(self._text.ids), 0)
        return _State(position, num_agreed, num_needed, confirmed_end, was_correct)


class PredictionWalk:
    """Chain of draft tokens that are copied from one position of the prediction to its end."""

    def __init__(self, ids: Sequence[int], position: int) -> None:
        self._ids = ids
        self._position = position

    def next(self) -> Counts | None:
        if self._position >= len(self._ids):
            return None
        return sorted_counts({self._ids[self._position]: 1})

    def step(self, token_id: int) -> None:
        if self._ids[self._position : self._position + 1] == [token_id]:
            self._position += 1
        else:
            self._position = len(self._ids)
