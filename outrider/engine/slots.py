"""A worker's slots: what is committed, what is cached, what of it others may share. No torch.

Owned by the engine thread. `SlotKeeper` translates jobs into these calls, `Turns` gives memory and takes it, the runner
fills the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outrider.engine.kv_pool import KVPool
from outrider.engine.open_slots import BareSlot, OpenSlots
from outrider.engine.scheduler import SlotKey
from outrider.wire.errors import InvalidRequest
from outrider.wire.params import SamplingParams


class Slot(BareSlot):
    """With what the model's cache holds of it. Change `committed` and `cached` through the methods only."""

    __slots__ = ("_num_agreed", "_pool", "_salt", "cached", "num_adopted", "table")

    def __init__(
        self,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        pool: KVPool,
        cache_salt: bytes = b"",
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params)
        self.cached: list[int] = []
        """Token ids whose KV is in the cache, in order; past the committed ones they are guesses."""
        self.table = pool.new_table()
        self.num_adopted: int | None = None
        """Tokens found in the prefix cache when the slot first began; None before that."""
        self._pool = pool
        self._salt = cache_salt
        self._num_agreed = 0  # cached[:_num_agreed] == committed[:_num_agreed] is known

    @property
    def most_cached(self) -> int:
        return max(self.max_len, (self._pool.num_blocks - 1) * self._pool.block_size)  # one may have to be copied

    @property
    def num_copied(self) -> int:
        """Blocks that the next token costs because it goes into one that others read: 0 or 1."""
        index, within = divmod(len(self.cached), self._pool.block_size)
        return int(within > 0 and self._pool.num_references(self.table.blocks[index]) > 1)

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        super().commit_from(base_len, ids)
        self._num_agreed = min(self._num_agreed, base_len)

    def settle(self) -> None:
        self.reconcile()
        self.publish()

    def reconcile(self) -> int:
        """Crop the cache to its longest prefix that is committed, at most committed_len - 1 tokens; returns that.

        The last committed token is always fed again, since its logits are what the next step needs.
        """
        limit = min(len(self.cached), len(self.committed) - 1)
        agreed = min(self._num_agreed, limit)
        pairs = zip(islice(self.cached, agreed, limit), islice(self.committed, agreed, limit), strict=True)
        for cached_id, committed_id in pairs:
            if cached_id != committed_id:
                break
            agreed += 1
        self._crop(agreed)
        self._num_agreed = agreed
        return agreed

    def fed(self, ids: Sequence[int]) -> None:
        """A forward has written the KV of these ids after the cached ones."""
        self.cached.extend(ids)

    def compacted(self, num_cached: int, ids: Sequence[int]) -> None:
        """After `num_cached` entries, of what was fed only these ids are left, in this order."""
        assert num_cached >= self._num_agreed, f"{self._num_agreed} entries are known to be committed"
        self.cached[num_cached:] = ids

    def forget_guesses(self) -> int:
        """Drop what is cached past the committed tokens; returns the blocks freed."""
        return self._crop(min(len(self.cached), len(self.committed)))

    def fed_committed(self, ids: Sequence[int]) -> None:
        """The same for ids that are committed, such as a prompt's: others may adopt them at once."""
        if self._num_agreed == len(self.cached):
            self._num_agreed += len(ids)
        self.cached.extend(ids)
        self.publish()

    def adopt(self) -> int:
        """Begin with what the prefix cache has of the committed tokens, all but the last; returns how many it had."""
        assert not self.cached, f"{len(self.cached)} tokens are cached already"
        num_tokens = self._pool.prefix.adopt(self.table, self.committed[:-1], self._salt)
        self.cached = self.committed[:num_tokens]
        self._num_agreed = num_tokens
        if self.num_adopted is None:
            self.num_adopted = num_tokens
        return num_tokens

    def publish(self) -> None:
        """Let others adopt the full blocks of what is known to be committed; guesses never."""
        prefix, num_agreed = self._pool.prefix, self._num_agreed
        if prefix.enabled and num_agreed // self._pool.block_size >= max(len(self.table.digests), 1):
            ids = self.cached if num_agreed == len(self.cached) else self.cached[:num_agreed]
            prefix.publish(self.table, ids, self._salt)

    def give_up(self) -> int:
        """Let all blocks go; what is committed stays known to the prefix cache. Returns the blocks that became free."""
        num_in_use = self._pool.num_in_use
        self.reconcile()
        self.publish()
        self._crop(0)
        return num_in_use - self._pool.num_in_use

    def distrust(self) -> None:
        """What is cached may be wrong: nobody may adopt it, and this slot begins anew."""
        for block in self.table.blocks:
            self._pool.prefix.withdraw(block)
        self._crop(0)

    def truncate(self, committed_len: int) -> int:
        """Keep at most committed_len - 1 cache entries; returns the blocks freed. Idempotent, `committed` stays.

        A length below 1 empties the cache: nobody waits for an answer, and an empty cache is always right.
        """
        return self._crop(max(committed_len - 1, 0))

    def _crop(self, num_cached: int) -> int:
        del self.cached[num_cached:]
        self._num_agreed = min(self._num_agreed, len(self.cached))
        return self.table.truncate(len(self.cached))  # also drops what a failed forward had reserved


class SlotTable(OpenSlots[Slot]):
    """Slots that share a pool of cache blocks."""

    def __init__(self, pool: KVPool, max_slots: int, context_limit: int) -> None:
        super().__init__(self._slot, max_slots, context_limit)
        self.pool = pool

    @property
    def num_blocks_in_use(self) -> int:
        return self.pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        return self.pool.num_cached

    def _slot(
        self, key: SlotKey, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams, cache_salt: bytes
    ) -> Slot:
        return Slot(key, committed_ids, num_prompt, params, self.pool, cache_salt)

    def _check_memory(self, max_len: int) -> None:
        needed = self.pool.num_blocks_for(max_len)
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"{max_len} tokens need {needed} cache blocks, this worker has {self.pool.num_blocks} of "
                f"{self.pool.block_size} tokens; lower max_tokens or raise kv_cache_tokens",
                param="max_tokens",
            )
