"""Slots without a cache, and the table of a worker's open slots. No torch.

A draft without a model has slots of this kind; `slots.py` adds the KV cache. Owned by the engine thread; `SlotKeeper`
translates jobs into calls of these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from outrider.engine.worker.jobs import SlotKey
from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded
from outrider.wire.requests.params import MAX_SALT_BYTES, SamplingParams
from outrider.wire.requests.scheduling import Scheduling

if TYPE_CHECKING:
    from outrider.drafting.translation import Translation


class MissingTokens(OutriderError):
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
        """Number of prompt tokens, which are the first of `committed`."""
        self.committed = list(committed_ids)
        """Token ids of prompt and output, never taken back by this worker alone."""
        self.scheduling = Scheduling()
        """Caller, its weight, and the request's priority."""
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
            raise MissingTokens(base_len, len(self.committed))
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
        """Number of open slots."""
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
        """Return the open slot with this key; None when there is none."""
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
        optional: dict[str, Any] = {}
        if self.takes_sources:
            optional["source_ids"] = source_ids
        if translation is not None:
            optional["translation"] = translation
        if self.has_corpus:
            optional["corpus_id"] = corpus_id
        slot = self._make(key, committed_ids, num_prompt, params, cache_salt=cache_salt, **optional)
        self._slots[key] = slot
        return slot

    def close(self, owner: int, slot_id: int) -> int:
        """Free the slot; return its number of cache blocks, 0 when it is not open. Closing twice is no error."""
        slot = self._slots.pop((owner, slot_id), None)
        if slot is None:
            return 0
        return slot.give_up()

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
        limit = 0
        allowed = "none without an encoder"
        if self.takes_sources:
            limit = self.context_limit
            allowed = f"at most {limit}, the context limit"
        if num_source > limit:
            raise InvalidRequest(
                f"a source of {num_source} tokens, and this worker reads {allowed}", param="source_ids"
            )
        if self.takes_sources and not num_source:
            raise InvalidRequest(
                "source_ids is empty, and this worker's encoder reads at least one token", param="source_ids"
            )

    def _check_memory(self, max_len: int, num_source: int) -> None:
        """Raise `InvalidRequest` when a slot of `max_len` tokens with a source of `num_source` could never fit."""
