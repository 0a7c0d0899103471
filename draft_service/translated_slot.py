"""A slot of a draft whose tokens are not its target's. On the engine thread."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.translation import Translation
from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import BareSlot, Slot
from outrider.wire.params import SamplingParams


class TranslatedSlot(Slot):
    """What is committed, positions and all that leaves are of the target's tokens; what is cached is of the draft's:
    the text as it would write it. A tree's nodes are one token of each, so that they go on being cached once they are
    committed, as long as the draft would write them so, too.
    """

    __slots__ = ("_limit", "_retelling", "translation")

    def __init__(
        self,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        pool: KVPool,
        cache_salt: bytes = b"",
        *,
        translation: Translation,
        context_limit: int,
    ) -> None:
        """context_limit: the draft's own."""
        super().__init__(key, committed_ids, num_prompt, params, pool, cache_salt)
        self.translation = translation
        self._limit = min(context_limit, (pool.num_blocks - 1) * pool.block_size)  # a block may have to be copied
        self._retelling = translation.retell()
        self._retelling.commit(self.committed, 0)

    @property
    def ids(self) -> list[int]:
        told = self._retelling.ids
        return told if len(told) <= self._limit else told[: self._limit]

    @property
    def most_depth(self) -> int:
        """Return what the draft's context has room for; 0 within a character, for which it has no word."""
        return max(0, self._limit + 1 - len(self._retelling.ids)) if self._retelling.is_whole else 0

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        before = self.committed[base_len:]
        BareSlot.commit_from(self, base_len, ids)
        num_same = base_len + _num_alike(before, ids)
        self._num_agreed = min(self._num_agreed, self._retelling.commit(self.committed, num_same))

    def rebased(self, start: int, ids: Sequence[int]) -> None:
        self.cached[start:] = ids
        self._num_agreed = self._agreeing(min(len(self.cached), len(self.ids)))
        self.publish()

    def is_told(self, num_cached: int) -> bool:
        """Return whether so many cached tokens are what is committed, all of it."""
        return self._num_agreed == num_cached == len(self.ids)

    def truncate(self, committed_len: int) -> int:
        if committed_len > len(self.committed):
            return self._crop(len(self.ids))
        return self._crop(self._retelling.num_told(max(committed_len - 1, 0)))


def _num_alike(before: Sequence[int], now: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    unlike = (place for place, (old, new) in enumerate(zip(before, now, strict=False)) if old != new)
    return next(unlike, min(len(before), len(now)))
