"""Slots with a KV cache: committed tokens, cached tokens, and what other slots may share of them. No torch.

Owned by the engine thread. `SlotKeeper` translates jobs into calls of these methods, `StepScheduler` allocates and
frees memory, the runner fills the block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.jobs import MAX_NARROW, SlotKey
from outrider.engine.worker.open_slots import BareSlot, MissingTokens, OpenSlots
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import SamplingParams

if TYPE_CHECKING:
    from outrider.drafting.translation import Translation
    from outrider.engine.step_plan import EncoderSource

__all__ = ["BareSlot", "MissingTokens", "OpenSlots", "PromptScores", "Slot", "SlotTable", "needs_prefill"]


def needs_prefill(slot: Slot) -> bool:
    """Return whether the slot needs a prefill before its step: its source is not encoded, or more than `most_narrow` of
    its tokens are not cached.
    """
    return slot.num_to_encode > 0 or slot.num_feedable - len(slot.cached) > slot.most_narrow


@dataclass(slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens from the second on. The logits at each token score the token after it."""

    num_tokens: int
    num_best: int
    found: list[Any] = field(default_factory=list)
    """Logprobs of the first tokens in order, as far as they have been computed."""


class Slot(BareSlot):
    """Slot of a model with a KV cache. Change `committed` and `cached` through the methods only."""

    __slots__ = ("_num_agreed", "_pool", "_salt", "cached", "first", "num_adopted", "scoring", "table")

    translation: ClassVar[Translation | None] = None
    """Map between the tokens of messages and the model's; None where they are the same."""

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
        """Token ids whose KV is in the cache, in order. Those past the committed tokens are draft tokens."""
        self.first = 0
        """Index of the committed token that the cache begins with."""
        self.table = pool.new_table()
        self.num_adopted: int | None = None
        """Number of tokens found in the prefix cache when the slot was first admitted; None before."""
        self.scoring: PromptScores | None = None
        """Logprobs of the prompt's tokens; None where none were requested, and after they were sent."""
        self._pool = pool
        self._salt = cache_salt
        self._num_agreed = 0  # cached[:_num_agreed] == committed[first:][:_num_agreed] is known

    @property
    def ids(self) -> list[int]:
        """Token ids that the model is fed for the committed tokens: the same ones, unless they are retokenized."""
        return self.committed

    @property
    def source(self) -> EncoderSource | None:
        """Encoder output that its rows attend to by cross-attention; None without an encoder."""
        return None

    @property
    def num_source_tokens(self) -> int:
        """Number of tokens of the encoder's source; 0 without an encoder."""
        return 0

    @property
    def num_source_blocks(self) -> int:
        """Number of cache blocks of the encoder's source, held or not."""
        return 0

    @property
    def num_to_encode(self) -> int:
        """Number of source tokens that the encoder has yet to read: all or none."""
        return 0

    @property
    def num_blocks(self) -> int:
        """Number of cache blocks that the slot holds."""
        return len(self.table.blocks)

    @property
    def most_cached(self) -> int:
        num_blocks = self._pool.num_blocks - self.num_source_blocks - 1  # one may have to be copied
        return max(self.max_len, num_blocks * self._pool.block_size)

    @property
    def num_unscored(self) -> int:
        """Number of prompt tokens whose logprobs are requested and not yet computed."""
        if self.scoring is None:
            return 0
        return self.scoring.num_tokens - len(self.scoring.found)

    @property
    def most_narrow(self) -> int:
        """Maximum number of uncached tokens that run in a step without a prefill; 1 while tokens are to be scored."""
        if self.num_unscored:
            return 1
        return MAX_NARROW

    @property
    def num_feedable(self) -> int:
        """Number of tokens that the cache will hold once every committed token that may be fed has been fed."""
        return len(self.ids) - self.first

    def uncached(self, most: int | None = None) -> list[int]:
        """Return the committed tokens that are not cached and are fed next, `most` at most."""
        start = self.first + len(self.cached)
        if most is None:
            return self.ids[start:]
        return self.ids[start : start + most]

    def features_of(self, num_tokens: int) -> Any:
        """Return the features that a forward needs beside the next `num_tokens` uncached tokens, [num_tokens, width].

        None where the model takes ids alone.
        """
        return None

    @property
    def num_copied(self) -> int:
        """Number of blocks that copy-on-write costs the next token, because it goes into a shared block: 0 or 1."""
        index, within = divmod(len(self.cached), self._pool.block_size)
        return int(within > 0 and self._pool.num_references(self.table.blocks[index]) > 1)

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        super().commit_from(base_len, ids)
        self._num_agreed = min(self._num_agreed, max(0, base_len - self.first))

    def settle(self) -> None:
        """Truncate the cache to the committed tokens, and publish their full blocks to the prefix cache."""
        self.reconcile()
        self.publish()

    def reconcile(self) -> int:
        """Truncate the cache to its longest committed prefix of at most committed_len - 1 tokens; return its length.

        The last committed token is always fed again: the next step needs its logits.

        committed [5, 6, 7, 8], cached [5, 6, 9]: the cache becomes [5, 6]
        committed [5, 6, 7], cached [5, 6, 7]: the cache becomes [5, 6]
        """
        agreed = self._agreeing(min(len(self.cached), len(self.ids) - 1 - self.first))
        self._crop(agreed)
        self._num_agreed = agreed
        return agreed

    def _agreeing(self, limit: int) -> int:
        first, agreed = self.first, min(self._num_agreed, limit)
        committed = islice(self.ids, first + agreed, first + limit)
        pairs = zip(islice(self.cached, agreed, limit), committed, strict=True)
        for cached_id, committed_id in pairs:
            if cached_id != committed_id:
                break
            agreed += 1
        return agreed

    def fed(self, ids: Sequence[int]) -> None:
        """Record that a forward has written the KV of `ids` after the cached tokens."""
        self.cached.extend(ids)

    def compacted(self, num_cached: int, ids: Sequence[int]) -> None:
        """Record that, of the tokens fed after `num_cached` entries, only `ids` remain in the cache, in this order."""
        assert num_cached >= self._num_agreed, f"{self._num_agreed} entries are known to be committed"
        self.cached[num_cached:] = ids

    def rebased(self, start: int, ids: Sequence[int]) -> None:
        """Record that `ids` remain in the cache after `start` entries: committed tokens first, then draft tokens that
        are still in the tree.
        """
        self.cached[start:] = ids
        self._num_agreed = self._agreeing(min(len(self.cached), len(self.ids) - self.first))
        self.publish()

    def fed_committed(self, ids: Sequence[int]) -> None:
        """Record that a forward has written the KV of committed `ids`, such as a prompt's. Other slots may adopt it at
        once; `fed` does not publish.
        """
        if self._num_agreed == len(self.cached):
            self._num_agreed += len(ids)
        self.cached.extend(ids)
        self.publish()

    def adopt(self) -> int:
        """Adopt the cached prefix of the committed tokens; return its length in tokens.

        The last committed token and tokens that are still to be scored are not adopted.
        """
        assert not self.cached, f"{len(self.cached)} tokens are cached already"
        end = -1
        if self.scoring is not None and self.num_unscored:
            end = self.first + len(self.scoring.found)
        num_tokens = self._pool.prefix.adopt(self.table, self.ids[self.first : end], self._salt)
        self.cached = self.ids[self.first : self.first + num_tokens]
        self._num_agreed = num_tokens
        if self.num_adopted is None:
            self.num_adopted = num_tokens
        return num_tokens

    def publish(self) -> None:
        """Publish the full blocks of committed tokens to the prefix cache; draft tokens are never published."""
        prefix, num_agreed = self._pool.prefix, self._num_agreed
        if prefix.enabled and num_agreed // self._pool.block_size >= max(len(self.table.digests), 1):
            ids = self.cached
            if num_agreed < len(ids):
                ids = ids[:num_agreed]
            prefix.publish(self.table, ids, self._salt)

    def give_up(self) -> int:
        """Free all blocks; return how many became free. The prefix cache keeps what is committed."""
        num_in_use = self._pool.num_in_use
        self.reconcile()
        self.publish()
        self._crop(0)
        return num_in_use - self._pool.num_in_use

    def distrust(self) -> None:
        """Discard a cache that may be wrong. No slot may adopt its blocks; this one starts again from its tokens."""
        for block in self.table.blocks:
            self._pool.prefix.withdraw(block)
        self._crop(0)

    def truncate(self, committed_len: int) -> int:
        """Truncate the cache to at most committed_len - 1 entries; return the blocks freed. `committed` stays.

        Calling it twice is harmless. A length below 1 empties the cache, which is always correct.
        """
        return self._crop(max(committed_len - 1 - self.first, 0))

    def _crop(self, num_cached: int) -> int:
        del self.cached[num_cached:]
        self._num_agreed = min(self._num_agreed, len(self.cached))
        return self.table.truncate(len(self.cached))  # also drops what a failed forward had reserved


class SlotTable(OpenSlots[Slot]):
    """Open slots that share a pool of cache blocks."""

    def __init__(
        self,
        pool: KVPool,
        max_slots: int,
        context_limit: int,
        make_cached: Callable[..., Slot] = Slot,
        *,
        takes_sources: bool = False,
    ) -> None:
        """Create an empty table. `make_cached`: creates a slot with the arguments of `Slot`, or of `SourceSlot` where
        there are sources.
        """
        super().__init__(partial(make_cached, pool=pool), max_slots, context_limit, takes_sources=takes_sources)
        self.pool = pool

    @property
    def num_blocks_in_use(self) -> int:
        return self.pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        return self.pool.num_cached

    def _check_memory(self, max_len: int, num_source: int) -> None:
        needed = self.pool.num_blocks_for(max_len) + self.pool.num_blocks_for(num_source)
        if needed > self.pool.num_blocks:
            source = ""
            if num_source:
                source = f" and a source of {num_source}"
            raise InvalidRequest(
                f"{max_len} tokens{source} need {needed} cache blocks, this worker has {self.pool.num_blocks} of "
                f"{self.pool.block_size} tokens; lower max_tokens, or n of a beam search, or raise kv_cache_tokens",
                param="max_tokens",
            )
