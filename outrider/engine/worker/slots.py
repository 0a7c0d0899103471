"""State of a worker's slots: committed tokens, cached tokens, and what other slots may share of them. No torch.

Owned by the engine thread. `SlotKeeper` translates jobs into calls of these methods, `StepScheduler` allocates and
frees memory, the runner fills the block tables. A draft without a model has slots without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import grpc

from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.jobs import MAX_NARROW, SlotKey
from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded
from outrider.wire.requests.params import MAX_SALT_BYTES, SamplingParams
from outrider.wire.requests.scheduling import Scheduling

if TYPE_CHECKING:
    from outrider.drafting.translation import Translation
    from outrider.engine.step_plan import Source


class Behind(OutriderError):
    """Raised when a message's `base_len` is past the slot's committed tokens: send it again from `known_len`."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, base_len: int, known_len: int) -> None:
        super().__init__(f"base_len is {base_len}, this slot knows {known_len} tokens; send again from {known_len}")
        self.known_len = known_len


class BareSlot:
    """Committed tokens of one choice of a request in one worker. Change `committed` through the methods only."""

    __slots__ = ("asked_s", "committed", "key", "num_prompt", "params", "scheduling")

    def __init__(self, key: SlotKey, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams) -> None:
        self.key = key
        self.params = params
        self.num_prompt = num_prompt
        self.committed = list(committed_ids)
        self.scheduling = Scheduling()
        self.asked_s = 0.0
        """Monotonic time of the last message that requested work, or of its reply, in seconds."""

    @property
    def max_len(self) -> int:
        """Maximum number of tokens, prompt and output, that the slot may ever hold."""
        return self.num_prompt + self.params.max_tokens

    @property
    def most_cached(self) -> int:
        """Maximum number of tokens in the cache at once. It may exceed `max_len`: siblings of a draft tree are cached
        too.
        """
        return self.max_len

    @property
    def most_depth(self) -> int:
        """Maximum depth of a draft tree under the committed tokens."""
        return self.params.max_tokens

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """Replace `committed` with `committed[:base_len] + ids`. A message may repeat, extend or shorten it.

        Raises `Behind` when `base_len` is past the committed tokens. Raises `InvalidRequest` when the result would lose
        part of the prompt or be longer than `max_len`. Nothing changes then.
        """
        self.check_commit(base_len, len(ids))
        self.committed[base_len:] = ids

    def check_commit(self, base_len: int, num_ids: int) -> None:
        """Raise what `commit_from` raises for `num_ids` ids."""
        if base_len > len(self.committed):
            raise Behind(base_len, len(self.committed))
        new_len = base_len + num_ids
        if base_len < 0 or not self.num_prompt <= new_len <= self.max_len:
            raise InvalidRequest(
                f"base_len {base_len} and {num_ids} committed ids make {new_len} tokens, "
                f"this slot holds {self.num_prompt} to {self.max_len}",
                param="base_len",
            )

    def settle(self) -> None:
        """Bring what is kept beside the committed ids up to date with them, after a message."""

    def distrust(self) -> None:
        """Discard what is kept beside the committed ids, for good: it may be wrong."""

    def truncate(self, committed_len: int) -> int:
        """Discard what was made past `committed_len`; return the number of cache blocks freed. `committed` stays."""
        return 0

    def give_up(self) -> int:
        """Discard everything but `committed`; return the number of cache blocks freed."""
        return 0

    def make_way(self) -> int:
        """Free the slot for another of the same key; return its cache blocks. The choice has not ended."""
        return self.give_up()


S = TypeVar("S", bound=BareSlot)
MakeSlot = Callable[..., S]
"""Creates a slot from `key`, `committed_ids`, `num_prompt`, `params`, and `cache_salt` by name; and, where they apply,
`source_ids`, `translation` and `corpus_id` by name."""


class OpenSlots(Generic[S]):
    """All open slots of a worker. Iterates over them, the longest open first."""

    def __init__(
        self,
        make: MakeSlot[S],
        max_slots: int,
        context_limit: int,
        *,
        takes_sources: bool = False,
        has_corpus: bool = False,
    ) -> None:
        """Create an empty collection.

        `takes_sources`: whether slots are of an encoder-decoder model. `has_corpus`: whether `make` takes a
        `corpus_id`.
        """
        self.max_slots = max_slots
        self.context_limit = context_limit
        self.takes_sources = takes_sources
        self.has_corpus = has_corpus
        self._make = make
        self._slots: dict[SlotKey, S] = {}

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._slots.values()))

    @property
    def num_in_use(self) -> int:
        return len(self._slots)

    @property
    def num_blocks_in_use(self) -> int:
        """Number of cache blocks that slots hold."""
        return 0

    @property
    def num_blocks_cached(self) -> int:
        """Number of cache blocks that no slot holds, kept for later prompts."""
        return 0

    def get(self, owner: int, slot_id: int) -> S | None:
        return self._slots.get((owner, slot_id))

    def open(
        self,
        owner: int,
        slot_id: int,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        cache_salt: bytes = b"",
        source_ids: Sequence[int] = (),
        translation: Translation | None = None,
        corpus_id: bytes = b"",
    ) -> S:
        """Open a slot, after freeing an open one of the same key. It has no cached tokens and no memory yet.

        `translation`: maps between the tokens of messages and the model's, where they differ. `corpus_id`: as in
        `OpenJob`.

        Raises `InvalidRequest` when the slot could never fit, and `Overloaded` when all slots are in use. Both messages
        give the numbers, and both leave an open slot of the same key as it was.
        """
        key = (owner, slot_id)
        self._check_lengths(len(committed_ids), num_prompt, params.max_tokens)
        self._check_source(len(source_ids))
        self._check_memory(num_prompt + params.most_cached, len(source_ids))
        num_others = len(self._slots) - (key in self._slots)
        if num_others >= self.max_slots:
            raise Overloaded(f"all {self.max_slots} slots are in use; retry later or raise max_slots")
        if len(cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(
                f"cache_salt has {len(cache_salt)} bytes, at most {MAX_SALT_BYTES} are allowed", param="cache_salt"
            )
        if key in self._slots:
            self._slots.pop(key).make_way()
        more: dict[str, Any] = {"source_ids": source_ids} if self.takes_sources else {}
        if translation is not None:
            more["translation"] = translation
        if self.has_corpus:
            more["corpus_id"] = corpus_id
        slot = self._slots[key] = self._make(key, committed_ids, num_prompt, params, cache_salt=cache_salt, **more)
        return slot

    def close(self, owner: int, slot_id: int) -> int:
        """Free the slot; return its number of cache blocks, 0 when it is not open. Closing twice is no error."""
        slot = self._slots.pop((owner, slot_id), None)
        return 0 if slot is None else slot.give_up()

    def close_owner(self, owner: int) -> int:
        """Free every slot of a stream that ended; return their number."""
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

    def _check_source(self, num_source: int) -> None:
        if num_source > (self.context_limit if self.takes_sources else 0):
            most = (
                f"at most {self.context_limit}, the context limit" if self.takes_sources else "none without an encoder"
            )
            raise InvalidRequest(f"a source of {num_source} tokens, and this worker reads {most}", param="source_ids")
        if self.takes_sources and not num_source:
            raise InvalidRequest(
                "source_ids is empty, and this worker's encoder reads at least one token", param="source_ids"
            )

    def _check_memory(self, max_len: int, num_source: int) -> None:
        """Raise `InvalidRequest` when a slot of `max_len` tokens with a source of `num_source` could never fit."""


def needs_prefill(slot: Slot) -> bool:
    """Return whether the slot needs a prefill before its step: its source is not encoded, or more than `most_narrow` of
    its tokens are not cached.
    """
    return slot.num_to_encode > 0 or slot.num_feedable - len(slot.cached) > slot.most_narrow


@dataclass(slots=True)
class Scoring:
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
        self.scoring: Scoring | None = None
        """Logprobs of the prompt's tokens; None where none were requested, and after they were sent."""
        self._pool = pool
        self._salt = cache_salt
        self._num_agreed = 0  # cached[:_num_agreed] == committed[first:][:_num_agreed] is known

    @property
    def ids(self) -> list[int]:
        """Token ids that the model is fed for the committed tokens: the same ones, unless they are retokenized."""
        return self.committed

    @property
    def source(self) -> Source | None:
        """Encoder output that its rows attend to by cross-attention; None without an encoder."""
        return None

    @property
    def num_source_tokens(self) -> int:
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
        return 0 if self.scoring is None else self.scoring.num_tokens - len(self.scoring.found)

    @property
    def most_narrow(self) -> int:
        """Maximum number of uncached tokens that run in a step without a prefill; 1 while tokens are to be scored."""
        return 1 if self.num_unscored else MAX_NARROW

    @property
    def num_feedable(self) -> int:
        """Number of tokens that the cache will hold once every committed token that may be fed has been fed."""
        return len(self.ids) - self.first

    def uncached(self, most: int | None = None) -> list[int]:
        """Return the committed tokens that are not cached and are fed next, `most` at most."""
        start = self.first + len(self.cached)
        return self.ids[start : None if most is None else start + most]

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
        end = self.first + len(self.scoring.found) if self.scoring is not None and self.num_unscored else -1
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
            ids = self.cached if num_agreed == len(self.cached) else self.cached[:num_agreed]
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
            across = f" and a source of {num_source}" if num_source else ""
            raise InvalidRequest(
                f"{max_len} tokens{across} need {needed} cache blocks, this worker has {self.pool.num_blocks} of "
                f"{self.pool.block_size} tokens; lower max_tokens, or n of a beam search, or raise kv_cache_tokens",
                param="max_tokens",
            )
