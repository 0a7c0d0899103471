"""A slot of a draft whose tokens are not its target's. On the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafting.translation import Translation, num_alike
from outrider.engine.worker.slots import BareSlot, Slot


class TranslatedSlot(Slot):
    """Committed tokens, positions and draft tokens are of the target's vocabulary; cached tokens are of the draft's:
    the text as its tokenizer writes it. A node of the tree is one token in both, so that it stays cached once it is
    committed, as long as the draft's tokenizer would write it so, too.
    """

    __slots__ = ("_limit", "_retokenization", "guesses", "has_ended", "translation", "written")

    def __init__(self, context_limit: int, *slot: Any, translation: Translation, **more: Any) -> None:
        """context_limit: the draft's own. slot, more: as `Slot` takes them."""
        super().__init__(*slot, **more)
        self.translation = translation
        self._limit = min(context_limit, (self._pool.num_blocks - 1) * self._pool.block_size)  # one may be copied
        self._retokenization = translation.retokenization()
        self._retokenization.commit(self.committed, 0)
        self._write_anew()

    def _write_anew(self) -> None:
        self.written: list[int] = []
        """Tokens of its own that the draft wrote behind `ids`; all but the last are cached."""
        self.guesses: list[int] = []
        """The same text in the target's tokens: the draft tokens."""
        self.has_ended = False
        """Whether nothing more will be written."""

    @property
    def writes(self) -> bool:
        """Return whether it drafts text in its own tokens, in place of tokens that both vocabularies have."""
        return self.params.greedy and self.translation.by_strings

    def next_written(self) -> list[int]:
        """Return the tokens whose feeding gives the next token of the text."""
        if self.written and len(self.cached) == len(self.ids) + len(self.written) - 1:
            return self.written[-1:]
        self._write_anew()  # nothing is written, or its memory was taken
        return self.uncached()

    def note_written(self, fed_ids: Sequence[int], own_id: int) -> None:
        """Record what was fed, and the token that the draft writes behind it. Draft tokens stay: nodes hang below."""
        self.fed(fed_ids)
        self.written.append(own_id)
        read, self.has_ended = self.translation.read(self.committed, self.written)
        is_as_before = read[: len(self.guesses)] == self.guesses
        if is_as_before:
            self.guesses = read
        self.has_ended |= not is_as_before or len(self.written) >= self.most_depth

    @property
    def ids(self) -> list[int]:
        ids = self._retokenization.ids
        return ids if len(ids) <= self._limit else ids[: self._limit]

    @property
    def most_depth(self) -> int:
        """Number of tokens that fit into the draft's context; 0 within a character, which none of its tokens ends."""
        return max(0, self._limit + 1 - len(self._retokenization.ids)) if self._retokenization.is_whole else 0

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        before = self.committed[base_len:]
        BareSlot.commit_from(self, base_len, ids)
        self._write_anew()
        num_same = base_len + num_alike(before, ids)
        self._num_agreed = min(self._num_agreed, self._retokenization.commit(self.committed, num_same))

    def is_told(self, num_cached: int) -> bool:
        """Return whether the first `num_cached` cached tokens are all of what is committed."""
        return self._num_agreed == num_cached == len(self.ids)

    def truncate(self, committed_len: int) -> int:
        return self._crop(self._retokenization.num_of(max(committed_len - 1, 0)))


def make_slot(context_limit: int, *slot: Any, translation: Translation | None = None, **more: Any) -> Slot:
    """Create a slot of a draft with a context of `context_limit` tokens. slot, more: as `Slot` takes them."""
    if translation is None:
        return Slot(*slot, **more)
    return TranslatedSlot(context_limit, *slot, translation=translation, **more)
