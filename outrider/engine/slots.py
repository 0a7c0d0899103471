"""A worker's slots: what is committed, what is cached, and who was promised how much memory. No torch.

Owned by the engine thread. `SlotKeeper` translates jobs into these calls; the runner fills the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import grpc

from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded
from outrider.wire.params import SamplingParams

SlotKey = tuple[int, int]
"""(owner, slot id): an owner is one gateway's stream."""


class Behind(OutriderError):
    """The slot is shorter than the message's base_len: send again from `known_len`."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, base_len: int, known_len: int) -> None:
        super().__init__(f"base_len is {base_len}, this slot knows {known_len} tokens; send again from {known_len}")
        self.known_len = known_len


class Slot:
    """One request in one worker (DESIGN 3.1, 3.2). Change `committed` and `cached` through the methods only."""

    __slots__ = ("_num_agreed", "cached", "committed", "key", "num_prompt", "params", "table")

    def __init__(
        self, key: SlotKey, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams, table: BlockTable
    ) -> None:
        self.key = key
        self.params = params
        self.num_prompt = num_prompt
        self.committed = list(committed_ids)
        self.cached: list[int] = []
        """Token ids whose KV is in the cache, in order; past the committed ones they are guesses."""
        self.table = table
        self._num_agreed = 0  # cached[:_num_agreed] == committed[:_num_agreed] is known

    @property
    def max_len(self) -> int:
        """Most tokens, prompt and output, that the slot may ever hold. Its memory is promised for these."""
        return self.num_prompt + self.params.max_tokens

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """committed = committed[:base_len] + ids. The message decides: it may repeat, extend or shorten what is here.

        Raises Behind when base_len is past what is known, InvalidRequest when the result loses part of the prompt or
        is longer than max_len; nothing changes then.
        """
        if base_len > len(self.committed):
            raise Behind(base_len, len(self.committed))
        new_len = base_len + len(ids)
        if base_len < 0 or not self.num_prompt <= new_len <= self.max_len:
            raise InvalidRequest(
                f"base_len {base_len} and {len(ids)} committed ids make {new_len} tokens, "
                f"this slot holds {self.num_prompt} to {self.max_len}",
                param="base_len",
            )
        self.committed[base_len:] = ids
        self._num_agreed = min(self._num_agreed, base_len)

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

    def truncate(self, committed_len: int) -> int:
        """Keep at most committed_len - 1 cache entries; returns the blocks freed. Idempotent, `committed` stays.

        A length below 1 empties the cache: nobody waits for an answer, and an empty cache is always right.
        """
        return self._crop(max(committed_len - 1, 0))

    def _crop(self, num_cached: int) -> int:
        del self.cached[num_cached:]
        self._num_agreed = min(self._num_agreed, len(self.cached))
        return self.table.truncate(len(self.cached))  # also drops what a failed forward had reserved


class SlotTable:
    """All slots of a worker. Iterates over them, the longest open first."""

    def __init__(self, pool: KVPool, max_slots: int, context_limit: int) -> None:
        self.pool = pool
        self.max_slots = max_slots
        self.context_limit = context_limit
        self._slots: dict[SlotKey, Slot] = {}
        self._num_promised = 0  # blocks that the open slots may come to need; never more than the pool has

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    @property
    def num_in_use(self) -> int:
        return len(self._slots)

    def get(self, owner: int, slot_id: int) -> Slot | None:
        return self._slots.get((owner, slot_id))

    def open(
        self, owner: int, slot_id: int, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams
    ) -> Slot:
        """A new slot; one of the same key is freed first. Nothing is cached yet.

        Raises InvalidRequest when it could never fit, Overloaded when it does not fit now; both with the numbers, and
        both leave an older slot of the same key as it was.
        """
        key, max_len = (owner, slot_id), num_prompt + params.max_tokens
        self._check_lengths(len(committed_ids), num_prompt, params.max_tokens)
        self._check_room(key, max_len)
        self.close(owner, slot_id)
        slot = Slot(key, committed_ids, num_prompt, params, self.pool.new_table())
        self._slots[key] = slot
        self._num_promised += self.pool.num_blocks_for(max_len)
        return slot

    def close(self, owner: int, slot_id: int) -> int:
        """Free the slot; returns its blocks. 0 when there is none: closing twice is no fault."""
        slot = self._slots.pop((owner, slot_id), None)
        if slot is None:
            return 0
        self._num_promised -= self.pool.num_blocks_for(slot.max_len)
        slot.cached.clear()
        return slot.table.free()

    def close_owner(self, owner: int) -> int:
        """Free every slot of a stream that ended; returns how many there were."""
        keys = [key for key in self._slots if key[0] == owner]
        for key in keys:
            self.close(*key)
        return len(keys)

    def _check_lengths(self, num_committed: int, num_prompt: int, max_tokens: int) -> None:
        max_len = num_prompt + max_tokens
        if not 1 <= num_prompt <= num_committed:
            raise InvalidRequest(
                f"num_prompt_tokens is {num_prompt}, must be from 1 to {num_committed}, the committed tokens",
                param="num_prompt_tokens",
            )
        if max_len > self.context_limit:
            raise InvalidRequest(
                f"prompt of {num_prompt} tokens plus max_tokens {max_tokens} is {max_len}, "
                f"the context limit is {self.context_limit}; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if num_committed > max_len:
            raise InvalidRequest(
                f"{num_committed} committed tokens are more than prompt plus max_tokens, {max_len}",
                param="committed_ids",
            )

    def _check_room(self, key: SlotKey, max_len: int) -> None:
        needed, old = self.pool.num_blocks_for(max_len), self._slots.get(key)
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"{max_len} tokens need {needed} cache blocks, this worker has {self.pool.num_blocks} of "
                f"{self.pool.block_size} tokens; lower max_tokens or raise kv_cache_tokens",
                param="max_tokens",
            )
        num_others = len(self._slots) - (old is not None)
        if num_others >= self.max_slots:
            raise Overloaded(f"all {self.max_slots} slots are in use; retry later or raise max_slots")
        promised = self._num_promised - (self.pool.num_blocks_for(old.max_len) if old is not None else 0)
        if promised + needed > self.pool.num_blocks:
            raise Overloaded(
                f"{max_len} tokens need {needed} cache blocks, {promised} of {self.pool.num_blocks} are promised to "
                f"{num_others} open slots; retry later or raise kv_cache_tokens"
            )
