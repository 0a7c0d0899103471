"""A slot of a draft worker whose vocabulary differs from its target's. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafting.translation import Translation, num_alike
from outrider.engine.worker.open_slots import BareSlot
from outrider.engine.worker.slots import Slot


class TranslatedSlot(Slot):
    """Slot of a draft worker whose target has another vocabulary.

    Committed tokens, positions and draft tokens are of the target's vocabulary. Cached tokens are of the draft worker's
    vocabulary: the committed text as the draft worker's tokenizer encodes it. A node of the tree is one token in both
    vocabularies. When a node is committed, its cache entry stays if the draft worker's encoding of the committed text
    has the node's token, too.

        # the text "unbelievable" is "un", "believ", "able" for the target: 3 `committed`
        # and "unbeliev", "able" for the draft worker: 2 `ids`
    """

    __slots__ = ("_limit", "_retokenization", "draft_ids", "has_ended", "translation", "written")

    translation: Translation

    def __init__(self, context_limit: int, *slot: Any, translation: Translation, **more: Any) -> None:
        """Create a slot. `context_limit`: maximum number of tokens in the draft worker's context. `translation`:
        between the two vocabularies. `slot`, `more`: arguments of `Slot`.
        """
        super().__init__(*slot, **more)
        self.translation = translation
        self._limit = min(context_limit, (self._pool.num_blocks - 1) * self._pool.block_size)  # one may be copied
        self._retokenization = translation.retokenization()
        self._retokenization.commit(self.committed, 0)
        self._write_anew()

    def _write_anew(self) -> None:
        self.written: list[int] = []
        """Tokens, in the draft worker's vocabulary, that its model has generated after the committed text. All but the
        last are cached."""
        self.draft_ids: list[int] = []
        """Draft tokens: the text of the tokens in `written`, in the target's vocabulary."""
        self.has_ended = False
        """Whether the draft model generates nothing more after the tokens in `written` until further tokens are
        committed."""

    @property
    def drafts_text(self) -> bool:
        """Whether the draft worker writes text in its own tokens, which is then encoded in the target's tokens. If
        False, it drafts only tokens that both vocabularies have.
        """
        return self.params.greedy and self.translation.by_strings

    def next_written(self) -> list[int]:
        """Return the ids, in the draft worker's vocabulary, to feed next. The logits after them give the next token of
        the text that the draft worker writes.
        """
        if self.written and len(self.cached) == len(self.ids) + len(self.written) - 1:
            return self.written[-1:]
        self._write_anew()  # nothing is written yet, or the slot was preempted
        return self.uncached()

    def note_written(self, fed_ids: Sequence[int], own_id: int) -> None:
        """Record the ids that were fed to the draft model, and the token that it generates after them.

        `fed_ids`, `own_id`: the fed and the generated ids, in the draft worker's vocabulary. All text generated since
        the last commit is encoded again in the target's tokens. If these do not begin with the present draft tokens,
        the present ones stay, as they are nodes of the tree, and no more are generated until the next commit.
        """
        self.fed(fed_ids)
        self.written.append(own_id)
        read, self.has_ended = self.translation.read(self.committed, self.written)
        is_as_before = read[: len(self.draft_ids)] == self.draft_ids
        if is_as_before:
            self.draft_ids = read
        self.has_ended |= not is_as_before or len(self.written) >= self.max_depth

    @property
    def ids(self) -> list[int]:
        """Ids of the committed text in the draft worker's vocabulary: all, or the first ones, as many as its context
        and its cache can hold.
        """
        ids = self._retokenization.ids
        if len(ids) <= self._limit:
            return ids
        return ids[: self._limit]

    @property
    def max_depth(self) -> int:
        """Maximum depth of the slot's draft tree, for which the draft worker's context and cache have room. It is 0 if
        the committed text ends inside a UTF-8 character.
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

    def is_cache_committed(self, num_cached: int) -> bool:
        """Return whether the cache holds exactly the committed text in the draft worker's tokens. `num_cached`: number
        of cached tokens.
        """
        return self._num_agreed == num_cached == len(self.ids)

    def truncate(self, committed_len: int) -> int:
        return self._crop(self._retokenization.num_ids_within(max(committed_len - 1, 0)))


def make_slot(context_limit: int, *slot: Any, translation: Translation | None = None, **more: Any) -> Slot:
    """Create a slot of a draft worker with a model: a `TranslatedSlot` if a translation between vocabularies is given,
    else a `Slot`.

    `context_limit`: maximum number of tokens in the draft worker's context. `slot`, `more`: arguments of `Slot`.
    """
    if translation is None:
        return Slot(*slot, **more)
    return TranslatedSlot(context_limit, *slot, translation=translation, **more)
