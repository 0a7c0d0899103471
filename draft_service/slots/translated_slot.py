"""A slot of a draft whose vocabulary is not its target's. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafting.translation import Translation, num_alike
from outrider.engine.worker.open_slots import BareSlot
from outrider.engine.worker.slots import Slot


class TranslatedSlot(Slot):
    """Slot of a draft whose target has another vocabulary.

    Committed tokens, positions and draft tokens are of the target's vocabulary; cached tokens are of the draft's. The
    cached tokens are the committed text as the draft's tokenizer encodes it. A node of the tree is one token in both
    vocabularies. It stays cached when it is committed, as long as the draft's tokenizer would encode the text that way,
    too.

        # the target's tokens "un", "believ", "able" are the draft's "unbeliev", "able": `committed` has 3, `ids` has 2
    """

    __slots__ = ("_limit", "_retokenization", "guesses", "has_ended", "translation", "written")

    def __init__(self, context_limit: int, *slot: Any, translation: Translation, **more: Any) -> None:
        """Create a slot. `context_limit`: the draft's own, in tokens. `slot`, `more`: arguments of `Slot`."""
        super().__init__(*slot, **more)
        self.translation = translation
        self._limit = min(context_limit, (self._pool.num_blocks - 1) * self._pool.block_size)  # one may be copied
        self._retokenization = translation.retokenization()
        self._retokenization.commit(self.committed, 0)
        self._write_anew()

    def _write_anew(self) -> None:
        self.written: list[int] = []
        """Tokens of its own vocabulary that the draft wrote after `ids`; all but the last are cached."""
        self.guesses: list[int] = []
        """The same text in the target's tokens: the draft tokens."""
        self.has_ended = False
        """Whether the draft's text has ended."""

    @property
    def drafts_text(self) -> bool:
        """Whether the slot drafts text in its own tokens, rather than tokens that both vocabularies have."""
        return self.params.greedy and self.translation.by_strings

    def next_written(self) -> list[int]:
        """Return the draft's tokens to feed for the next token of the text."""
        if self.written and len(self.cached) == len(self.ids) + len(self.written) - 1:
            return self.written[-1:]
        self._write_anew()  # nothing is written yet, or the slot was preempted
        return self.uncached()

    def note_written(self, fed_ids: Sequence[int], own_id: int) -> None:
        """Record the tokens that were fed, and the token that the draft writes after them.

        Earlier draft tokens do not change: the tree has nodes under them.
        """
        self.fed(fed_ids)
        self.written.append(own_id)
        read, self.has_ended = self.translation.read(self.committed, self.written)
        is_as_before = read[: len(self.guesses)] == self.guesses
        if is_as_before:
            self.guesses = read
        self.has_ended |= not is_as_before or len(self.written) >= self.most_depth

    @property
    def ids(self) -> list[int]:
        """Committed text in the draft's tokens, at most as many as its context holds."""
        ids = self._retokenization.ids
        if len(ids) <= self._limit:
            return ids
        return ids[: self._limit]

    @property
    def most_depth(self) -> int:
        """Maximum depth of a draft tree within the draft's context. 0 if the committed text ends within a character,
        which no draft token completes.
        """
        if not self._retokenization.is_whole:
            return 0
        return max(0, self._limit + 1 - len(self._retokenization.ids))

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        previous = self.committed[base_len:]
        BareSlot.commit_from(self, base_len, ids)
        self._write_anew()
        num_same = base_len + num_alike(previous, ids)
        self._num_agreed = min(self._num_agreed, self._retokenization.commit(self.committed, num_same))

    def is_told(self, num_cached: int) -> bool:
        """Return whether the first `num_cached` cached tokens are all the committed tokens."""
        return self._num_agreed == num_cached == len(self.ids)

    def truncate(self, committed_len: int) -> int:
        return self._crop(self._retokenization.num_of(max(committed_len - 1, 0)))


def make_slot(context_limit: int, *slot: Any, translation: Translation | None = None, **more: Any) -> Slot:
    """Create a slot of a draft with a context of `context_limit` tokens. `slot`, `more`: arguments of `Slot`."""
    if translation is None:
        return Slot(*slot, **more)
    return TranslatedSlot(context_limit, *slot, translation=translation, **more)
