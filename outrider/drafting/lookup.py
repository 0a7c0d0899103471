"""The drafter `lookup`, which copies: it searches an earlier occurrence of the sequence's last tokens and proposes what
followed there. It searches the sequence itself and the outputs of ended requests (Saxena, "Prompt lookup decoding",
2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outrider.drafting.sequence_drafter import Counts, sorted_counts
from outrider.drafting.suffixes import SuffixIndex

MIN_N = 2
"""Minimum length of a match, in tokens. A match is an earlier occurrence, in the sequence or the corpus, of the
sequence's last tokens."""
MAX_N = 8
"""Maximum length of a match, in tokens. Longer matches count as matches of this length."""
CORPUS_TOKENS = 65536
"""Maximum number of tokens that the corpus holds, of all ended outputs together. They take about 1 MiB."""


class Lookup:
    """Drafter that proposes the tokens that followed an earlier occurrence of the sequence's last tokens, in the
    sequence itself or in a corpus of outputs that have ended.
    """

    def __init__(self, min_n: int = MIN_N, max_n: int = MAX_N, corpus_tokens: int = CORPUS_TOKENS) -> None:
        """`min_n`: minimum length of a match, in tokens. `max_n`: length up to which a longer match is preferred.
        `corpus_tokens`: number of tokens of ended outputs to keep, for all corpus ids together.
        """
        self._sizes = (min_n, max_n)
        self.corpus = Corpus(min_n, max_n, corpus_tokens)

    def open(self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes = b"") -> LookupFollower:
        return LookupFollower(token_ids, num_prompt, corpus_id, self._sizes, self.corpus)


class Corpus:
    """Outputs that have ended, kept for the drafter Lookup: the latest ones, with at most `max_tokens` tokens in all.
    Each corpus id has a separate index, so that no user's text is proposed to another. Outputs with an empty corpus id
    are not kept.
    """

    def __init__(self, min_n: int, max_n: int, max_tokens: int) -> None:
        self.num_tokens = 0
        """Number of tokens of all kept outputs."""
        self._sizes = (min_n, max_n)
        self._max_tokens = max_tokens
        self._shelves: dict[bytes, SuffixIndex] = {}
        """Index of the outputs of each corpus id."""
        self._outputs: deque[tuple[bytes, int]] = deque()
        """corpus_id and number of tokens of each output, the oldest first."""

    def index_of(self, corpus_id: bytes) -> SuffixIndex | None:
        """Return the index of the kept outputs with a corpus id; None = there are no such outputs."""
        return self._shelves.get(corpus_id)

    def add(self, output_ids: Sequence[int], corpus_id: bytes) -> None:
        """Add the last `max_tokens` tokens of an ended output. The oldest outputs are forgotten to make room."""
        kept = output_ids[max(0, len(output_ids) - self._max_tokens) :]
        if not corpus_id or len(kept) <= self._sizes[0]:
            return  # too short to have a match with a token after it
        while self.num_tokens + len(kept) > self._max_tokens:
            self._forget_oldest()
        shelf = self._shelves.setdefault(corpus_id, SuffixIndex(*self._sizes))
        for token_id in (*kept, None):
            shelf.append(token_id)
        self._outputs.append((corpus_id, len(kept)))
        self.num_tokens += len(kept)

    def _forget_oldest(self) -> None:
        corpus_id, num_tokens = self._outputs.popleft()
        self.num_tokens -= num_tokens
        shelf = self._shelves[corpus_id]
        shelf.drop(num_tokens + 1)  # and the separator after it
        if shelf.is_empty:
            del self._shelves[corpus_id]


class LookupFollower:
    """State of the drafter Lookup for one sequence: an index of the sequence's n-grams."""

    def __init__(
        self, token_ids: Sequence[int], num_prompt: int, corpus_id: bytes, sizes: tuple[int, int], corpus: Corpus
    ) -> None:
        """Follow a sequence of which the first `num_prompt` tokens are the prompt. `sizes`: minimum and maximum length
        of a match, in tokens. `corpus`: the drafter's corpus, of which only outputs with `corpus_id` are used.
        """
        self._own = SuffixIndex(*sizes)
        self._num_prompt = num_prompt
        self._corpus_id = corpus_id
        self._max_n = sizes[1]
        self._corpus = corpus
        self.append(token_ids)

    @property
    def num_tokens(self) -> int:
        return self._own.end

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._own.append(token_id)

    def truncate(self, num_tokens: int) -> None:
        while self._own.end > num_tokens:
            self._own.pop()

    def walk(self) -> LookupWalk:
        """Return a chain of draft tokens: those that follow the longest earlier occurrence of the sequence's last
        tokens. Of equally long ones, an occurrence in the sequence itself is preferred, then the latest.

        sequence [1, 2, 3, 9, 1, 2, 3]: the match is [1, 2, 3] at position 0, and the chain is 9, 1, 2, 3, 9, ...
        """
        tail = self._own.last(self._max_n)
        own = self._own.longest(tail)
        shelf = self._corpus.index_of(self._corpus_id)
        if shelf is not None:
            other = shelf.longest(tail)
            if other is not None and (own is None or other.length > own.length):
                return LookupWalk(shelf, other.end)
        if own is None:
            return LookupWalk(self._own, None)
        return LookupWalk(self._own, own.end)

    def has_next(self) -> bool:
        return self.walk().next() is not None

    def close(self) -> None:
        output = self._own.last(self._own.end - self._num_prompt)
        self._corpus.add([token_id for token_id in output if token_id is not None], self._corpus_id)


class LookupWalk:
    """Chain of draft tokens that are copied from one position of the sequence itself, or of the corpus, onwards. At the
    end of the sequence it copies the draft tokens made so far, so that a text that repeats itself continues.
    """

    def __init__(self, index: SuffixIndex, position: int | None) -> None:
        self._index = index
        self._position = position
        """Position of the token to copy next, in the index or among the walk's own copies after its end; None = there
        is nothing to copy."""
        self._draft_ids: list[int] = []

    def next(self) -> Counts | None:
        token_id = self._next_id()
        if token_id is None:
            return None
        return sorted_counts({token_id: 1})

    def step(self, token_id: int) -> None:
        is_copy = token_id == self._next_id()
        self._draft_ids.append(token_id)
        if self._position is not None and is_copy:
            self._position += 1
        else:
            self._position = None

    def _next_id(self) -> int | None:
        if self._position is None:
            return None
        num_behind = self._position - self._index.end
        if num_behind >= 0:  # the draft tokens continue the index's tokens
            return self._draft_ids[num_behind]
        return self._index.at(self._position)
