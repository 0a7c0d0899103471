"""Slots without a cache, and the table of a worker's open slots. No torch.

A draft worker without a model has slots of this kind; `slots.py` adds the KV cache. The engine thread owns them;
`SlotKeeper` translates jobs into calls of these methods.
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
    """Raised if a message continues a slot after `base_len` committed tokens, but this worker has only `committed_len`
    of them. The sender has to send the tokens again from index `committed_len` on.
    """

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, base_len: int, committed_len: int) -> None:
        super().__init__(
            f"base_len is {base_len}, this slot knows {committed_len} tokens; send again from {committed_len}"
        )
        self.committed_len = committed_len


class BareSlot:
    """Slot without a cache: the committed tokens of one choice in one worker. Change `committed` only through the
    methods.
    """

    __slots__ = ("committed", "key", "last_request_s", "num_prompt", "params", "scheduling")

    def __init__(self, key: SlotKey, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams) -> None:
        self.key = key
        self.params = params
        self.num_prompt = num_prompt
        """Number of prompt tokens; they come first in `committed`."""
        self.committed = list(committed_ids)
        """Token ids of prompt and output. The worker never takes any back by itself."""
        self.scheduling = Scheduling()
        """Caller of the slot's request, the caller's scheduling weight, and the request's priority."""
        self.last_request_s = 0.0
        """Monotonic time, in seconds, of the last message that requested work for the slot, or of the reply to it."""

    @property
    def max_len(self) -> int:
        """Maximum number of tokens, prompt and output together, that the slot may ever hold."""
        return self.num_prompt + self.params.max_tokens

    @property
    def max_cached_len(self) -> int:
        """Maximum number of the slot's tokens in the cache at once. It may exceed `max_len`, since siblings in a draft
        tree are cached, too.
        """
        return self.max_len

    @property
    def max_depth(self) -> int:
        """Maximum depth of a draft tree below the committed tokens."""
        return self.params.max_tokens

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """Replace `committed` by `committed[:base_len] + ids`. The result may equal, extend or shorten it.

        Raises `MissingTokens` if `base_len` exceeds the number of committed tokens. Raises `InvalidRequest` if the
        result would lose part of the prompt or be longer than `max_len`. In both cases nothing changes.
        """
        self.check_commit(base_len, len(ids))
        self.committed[base_len:] = ids

    def check_commit(self, base_len: int, num_ids: int) -> None:
        """Raise `MissingTokens` if `base_len` exceeds the number of committed tokens. Raise `InvalidRequest` if num_ids
        ids after them would lose part of the prompt or exceed `max_len`.
        """
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
        """Adapt the rest of the slot's state, such as its cache, to the committed tokens after these changed."""

    def invalidate(self) -> None:
        """Discard for good all of the slot's state but the committed tokens, because it may be wrong."""

    def truncate(self, committed_len: int) -> int:
        """Keep at most the first committed_len - 1 committed tokens in the cache; return the number of freed blocks.

        The last committed token is fed again by the next step. `committed` stays.
        """
        return 0

    def free_cache(self) -> int:
        """Discard all of the slot's state but `committed`; return the number of freed cache blocks."""
        return 0

    def free_for_successor(self) -> int:
        """Free the slot because a new one with the same key replaces it; return the number of freed cache blocks. The
        output has not ended, so a table drafter does not learn it yet.
        """
        return self.free_cache()


S = TypeVar("S", bound=BareSlot)
MakeSlot = Callable[..., S]
"""Function that creates a slot from `key`, `committed_ids`, `num_prompt`, `params`, and by name `cache_salt` and, if
they apply, `source_ids`, `translation` and `corpus_id`."""


class OpenSlots(Generic[S]):
    """All open slots of a worker. Iteration yields the slots, the longest open first."""

    def __init__(
        self,
        make: MakeSlot[S],
        max_slots: int,
        context_limit: int,
        *,
        has_sources: bool = False,
        has_corpus: bool = False,
    ) -> None:
        """Create an empty table.

        `make`: creates a slot. `max_slots`: maximum number of open slots. `context_limit`: maximum number of tokens per
        slot. `has_sources`: whether the model has an encoder, so that slots have a source. `has_corpus`: whether
        `make` takes a `corpus_id`.
        """
        self.max_slots = max_slots
        self.context_limit = context_limit
        self.has_sources = has_sources
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
        """Number of cache blocks that open slots hold; 0 for slots without a cache."""
        return 0

    @property
    def num_blocks_cached(self) -> int:
        """Number of cache blocks that no slot holds and that are kept for later prompts."""
        return 0

    def get(self, owner: int, slot_id: int) -> S | None:
        """Return the open slot with this key; None if there is none."""
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
        """Open a slot, and return it. An open slot with the same key is freed first. The new slot has no cached tokens
        and no memory yet.

        `cache_salt`: the prefix cache is shared only with slots of the same salt. `source_ids`: token ids of the
        encoder's input. `translation`: map between the token ids of messages and the model's; None if they are the
        same. `corpus_id`: id of the corpus of ended outputs that the drafter `lookup` copies from; empty for none.

        Raises `InvalidRequest` if the slot's tokens could never fit into the worker's context or cache, and
        `Overloaded` if all slots are in use. After an error an open slot with the same key is as it was.
        """
        key = (owner, slot_id)
        self._check_lengths(len(committed_ids), num_prompt, params.max_tokens)
        self._check_source(len(source_ids))
        self._check_memory(num_prompt + params.max_cached, len(source_ids))
        num_others = len(self._slots) - (key in self._slots)
        if num_others >= self.max_slots:
            raise Overloaded(f"all {self.max_slots} slots are in use; retry later or raise max_slots")
        if len(cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(
                f"cache_salt has {len(cache_salt)} bytes, at most {MAX_SALT_BYTES} are allowed", param="cache_salt"
            )
        if key in self._slots:
            self._slots.pop(key).free_for_successor()
        optional: dict[str, Any] = {}
        if self.has_sources:
            optional["source_ids"] = source_ids
        if translation is not None:
            optional["translation"] = translation
        if self.has_corpus:
            optional["corpus_id"] = corpus_id
        slot = self._make(key, committed_ids, num_prompt, params, cache_salt=cache_salt, **optional)
        self._slots[key] = slot
        return slot

    def close(self, owner: int, slot_id: int) -> int:
        """Free a slot; return the number of freed cache blocks, or 0 if the slot is not open. Closing a slot twice is
        no error.
        """
        slot = self._slots.pop((owner, slot_id), None)
        if slot is None:
            return 0
        return slot.free_cache()

    def close_owner(self, owner: int) -> int:
        """Free all slots of a gateway's Control stream that ended; return the number of these slots."""
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
        if self.has_sources:
            limit = self.context_limit
            allowed = f"at most {limit}, the context limit"
        if num_source > limit:
            raise InvalidRequest(
                f"a source of {num_source} tokens, and this worker reads {allowed}", param="source_ids"
            )
        if self.has_sources and not num_source:
            raise InvalidRequest(
                "source_ids is empty, and this worker's encoder reads at least one token", param="source_ids"
            )

    def _check_memory(self, max_len: int, num_source: int) -> None:
        """Raise `InvalidRequest` if a slot of `max_len` tokens with a source of `num_source` tokens could never fit."""
