"""Slots with a KV cache: committed tokens, cached tokens, and the cache blocks that slots share. No torch.

The engine thread owns them. `SlotKeeper` translates jobs into calls of these methods, `StepScheduler` allocates and
frees memory, the runner fills the block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

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
    """Return whether the slot needs a prefill before it can verify or draft: its source is not encoded, or more than
    `max_narrow_tokens` of its tokens are not cached.
    """
    return slot.num_to_encode > 0 or slot.num_feedable - len(slot.cached) > slot.max_narrow_tokens


@dataclass(slots=True)
class PromptScores:
    """Requested log-probs of a prompt's tokens, while they are computed. They begin with the second token: the logits
    after each token score the next one.
    """

    num_tokens: int
    num_best: int
    found: list[Any] = field(default_factory=list)
    """Log-probs computed so far, in the order of the tokens, from the prompt's second token on."""


class Slot(BareSlot):
    """Slot of a model with a KV cache. Change `committed` and `cached` only through the methods."""

    __slots__ = ("_num_agreed", "_pool", "_salt", "cached", "first", "num_adopted", "scoring", "table")

    translation: Translation | None = None
    """Map between the token ids of messages and the model's; None if they are the same."""

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
        """Token ids whose keys and values are in the cache, in order. Those after the committed tokens are draft
        tokens."""
        self.first = 0
        """Index of the committed token with which the cache begins. It is 0 for models; the cache of a head may begin
        with a later token."""
        self.table = pool.new_table()
        self.num_adopted: int | None = None
        """Number of tokens that were found in the prefix cache when the slot was first admitted; None before that."""
        self.scoring: PromptScores | None = None
        """Log-probs of the prompt's tokens; None if none were requested, and after they were sent."""
        self._pool = pool
        self._salt = cache_salt
        self._num_agreed = 0  # cached[:_num_agreed] == committed[first:][:_num_agreed] is known

    @property
    def ids(self) -> list[int]:
        """Token ids of the committed text that the model is fed: `committed` itself or, in a draft worker that
        retokenizes, the text in the draft model's own tokens.
        """
        return self.committed

    @property
    def source(self) -> EncoderSource | None:
        """Input of the encoder, whose output the slot's rows attend to by cross-attention; None without an encoder."""
        return None

    @property
    def num_source_tokens(self) -> int:
        """Number of tokens of the encoder's input; 0 without an encoder."""
        return 0

    @property
    def num_source_blocks(self) -> int:
        """Number of cache blocks that the encoder's source takes, whether the slot holds them yet or not."""
        return 0

    @property
    def num_to_encode(self) -> int:
        """Number of source tokens that the encoder has not read yet: all of them or 0."""
        return 0

    @property
    def num_blocks(self) -> int:
        """Number of cache blocks that the slot holds."""
        return len(self.table.blocks)

    @property
    def max_cached_len(self) -> int:
        num_blocks = self._pool.num_blocks - self.num_source_blocks - 1  # one may have to be copied
        return max(self.max_len, num_blocks * self._pool.block_size)

    @property
    def num_unscored(self) -> int:
        """Number of prompt tokens whose log-probs are requested and not computed yet."""
        if self.scoring is None:
            return 0
        return self.scoring.num_tokens - len(self.scoring.found)

    @property
    def max_narrow_tokens(self) -> int:
        """Maximum number of uncached tokens with which the slot can verify or draft without a prefill before. It is 1
        while log-probs of prompt tokens are missing, since only a prefill computes them.
        """
        if self.num_unscored:
            return 1
        return MAX_NARROW

    @property
    def num_feedable(self) -> int:
        """Number of tokens in the cache after every committed token that can be fed now is fed. A head can feed only
        tokens whose features have arrived.
        """
        return len(self.ids) - self.first

    def uncached(self, max_tokens: int | None = None) -> list[int]:
        """Return the committed tokens that are fed next, because they are not cached; at most `max_tokens` of them."""
        start = self.first + len(self.cached)
        if max_tokens is None:
            return self.ids[start:]
        return self.ids[start : start + max_tokens]

    def features_of(self, num_tokens: int) -> Any:
        """Return the features that a head takes with the next `num_tokens` uncached tokens, [num_tokens, d]; None for a
        model that takes only token ids.
        """
        return None

    @property
    def num_copied(self) -> int:
        """Number of blocks that must be copied before the slot's next token is written: 1 if the block for that token
        is shared (copy-on-write), else 0.
        """
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
        """Truncate the cache to the longest prefix that agrees with the committed tokens, without the last of these;
        return its length.

        The last committed token is always fed again, since the next step needs the logits after it.

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
        """Record that a forward has written keys and values of `ids` after the cached tokens."""
        self.cached.extend(ids)

    def compacted(self, num_cached: int, ids: Sequence[int]) -> None:
        """Record that after the first `num_cached` cached tokens only `ids` remain, in this order."""
        assert num_cached >= self._num_agreed, f"{self._num_agreed} entries are known to be committed"
        self.cached[num_cached:] = ids

    def rebased(self, start: int, ids: Sequence[int]) -> None:
        """Record that after the first `start` cached tokens the cache holds only `ids`: committed tokens, then draft
        tokens that are still in the draft tree.
        """
        self.cached[start:] = ids
        self._num_agreed = self._agreeing(min(len(self.cached), len(self.ids) - self.first))
        self.publish()

    def fed_committed(self, ids: Sequence[int]) -> None:
        """Record that a forward has written keys and values of committed `ids`, such as those of a prompt. Unlike
        `fed`, it publishes them, so that other slots may adopt them at once.
        """
        if self._num_agreed == len(self.cached):
            self._num_agreed += len(ids)
        self.cached.extend(ids)
        self.publish()

    def adopt(self) -> int:
        """Take over the longest prefix of the committed tokens that the prefix cache holds; return its length in
        tokens.

        The last committed token is not taken over, since the logits after it are needed. If log-probs of prompt tokens
        are still to be computed, the prefix ends before the first token whose logits they need.
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
        """Publish the full blocks of committed tokens to the prefix cache. Draft tokens are never published."""
        prefix, num_agreed = self._pool.prefix, self._num_agreed
        if prefix.enabled and num_agreed // self._pool.block_size >= max(len(self.table.digests), 1):
            ids = self.cached
            if num_agreed < len(ids):
                ids = ids[:num_agreed]
            prefix.publish(self.table, ids, self._salt)

    def free_cache(self) -> int:
        """Free all blocks; return how many became free. The prefix cache keeps those of committed tokens."""
        num_in_use = self._pool.num_in_use
        self.reconcile()
        self.publish()
        self._crop(0)
        return num_in_use - self._pool.num_in_use

    def invalidate(self) -> None:
        """Discard the cache, because it may be wrong, and withdraw its blocks from the prefix cache. The slot is fed
        again from its first token.
        """
        for block in self.table.blocks:
            self._pool.prefix.withdraw(block)
        self._crop(0)

    def truncate(self, committed_len: int) -> int:
        """Truncate the cache so that it holds at most the first committed_len - 1 committed tokens; return the number
        of freed blocks. `committed` stays.

        Calling it twice is harmless. A length below 1 empties the cache, which is always correct.
        """
        return self._crop(max(committed_len - 1 - self.first, 0))

    def _crop(self, num_cached: int) -> int:
        del self.cached[num_cached:]
        self._num_agreed = min(self._num_agreed, len(self.cached))
        return self.table.truncate(len(self.cached))  # also drops what a failed forward had reserved


class SlotTable(OpenSlots[Slot]):
    """Table of a worker's open slots, which share the blocks of one KV cache."""

    def __init__(
        self,
        pool: KVPool,
        max_slots: int,
        context_limit: int,
        make_cached: Callable[..., Slot] = Slot,
        *,
        has_sources: bool = False,
    ) -> None:
        """Create an empty table. `make_cached`: class or function that creates a slot, with the arguments of `Slot`, or
        of `SourceSlot` if `has_sources`.
        """
        super().__init__(partial(make_cached, pool=pool), max_slots, context_limit, has_sources=has_sources)
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
