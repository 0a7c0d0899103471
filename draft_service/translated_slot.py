"""A slot of a draft whose tokens are not its target's. On the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafting.translation import Translation, num_alike
from outrider.engine.worker.slots import BareSlot, Slot


class TranslatedSlot(Slot):
    """What is committed, positions and all that leaves are of the target's tokens; what is cached is of the draft's:
    the text as it would write it. A tree's nodes are one token of each, so that they go on being cached once they are
    committed, as long as the draft would write them so, too.
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
        """What the draft wrote behind `ids` in its own tokens; all but the last are cached."""
        self.guesses: list[int] = []
        """The same as the target would write it."""
        self.has_ended = False
        """Whether nothing more will be written."""

    @property
    def writes(self) -> bool:
        """Whether what it guesses are texts of its own, and not tokens of both."""
        return self.params.greedy and self.translation.by_strings

    def next_written(self) -> list[int]:
        """Return what is fed to learn what the draft writes next."""
        if self.written and len(self.cached) == len(self.ids) + len(self.written) - 1:
            return self.written[-1:]
        self._write_anew()  # nothing is written, or its memory was taken
        return self.uncached()

    def note_written(self, fed_ids: Sequence[int], own_id: int) -> None:
        """Take note of what was fed, and of what the draft writes behind it. Guesses stay: others hang below."""
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
        """Return what the draft's context has room for; 0 within a character, for which it has no word."""
        return max(0, self._limit + 1 - len(self._retokenization.ids)) if self._retokenization.is_whole else 0

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        before = self.committed[base_len:]
        BareSlot.commit_from(self, base_len, ids)
        self._write_anew()
        num_same = base_len + num_alike(before, ids)
        self._num_agreed = min(self._num_agreed, self._retokenization.commit(self.committed, num_same))

    def is_told(self, num_cached: int) -> bool:
        """Return whether so many cached tokens are what is committed, all of it."""
        return self._num_agreed == num_cached == len(self.ids)

    def truncate(self, committed_len: int) -> int:
        if committed_len > len(self.committed):
            return self._crop(len(self.ids))
        return self._crop(self._retokenization.num_of(max(committed_len - 1, 0)))


def make_slot(context_limit: int, *slot: Any, translation: Translation | None = None, **more: Any) -> Slot:
    """Return a slot of a draft whose context has so many tokens. slot, more: as `Slot` takes them."""
    if translation is None:
        return Slot(*slot, **more)
    return TranslatedSlot(context_limit, *slot, translation=translation, **more)
