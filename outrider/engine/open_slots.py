"""A worker's slots, whatever it works with: which are open, and what is committed in each. No torch.

Owned by the engine thread. `slots.py` adds the cache of a model, a draft without a model its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import grpc

from outrider.engine.scheduler import SlotKey
from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded
from outrider.wire.params import MAX_SALT_BYTES, SamplingParams


class Behind(OutriderError):
    """The slot is shorter than the message's base_len: send again from `known_len`."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, base_len: int, known_len: int) -> None:
        super().__init__(f"base_len is {base_len}, this slot knows {known_len} tokens; send again from {known_len}")
        self.known_len = known_len


class BareSlot:
    """One request in one worker: what is committed (DESIGN 3.1, 3.2). Change `committed` through the methods only."""

    __slots__ = ("asked_s", "committed", "key", "num_prompt", "params")

    def __init__(self, key: SlotKey, committed_ids: Sequence[int], num_prompt: int, params: SamplingParams) -> None:
        self.key = key
        self.params = params
        self.num_prompt = num_prompt
        self.committed = list(committed_ids)
        self.asked_s = 0.0
        """Monotonic time of the last message that asked for work, or of the answer to it."""

    @property
    def max_len(self) -> int:
        """Most tokens, prompt and output, that the slot may ever hold."""
        return self.num_prompt + self.params.max_tokens

    @property
    def most_cached(self) -> int:
        """Most tokens that may lie in its cache at once: of a tree of guesses some are side by side."""
        return self.max_len

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

    def settle(self) -> None:
        """A message has been committed: what is kept beside the ids follows them."""

    def truncate(self, committed_len: int) -> int:
        """Keep nothing of what was made past that length; returns the cache blocks freed. `committed` stays."""
        return 0

    def give_up(self) -> int:
        """Keep nothing but `committed`; returns the cache blocks freed."""
        return 0

    def make_way(self) -> int:
        """As `give_up`, for another slot of the same answer: nothing has ended."""
        return self.give_up()


S = TypeVar("S", bound=BareSlot)
MakeSlot = Callable[[SlotKey, Sequence[int], int, SamplingParams, bytes], S]
"""(key, committed_ids, num_prompt, params, cache_salt) -> the slot."""


class OpenSlots(Generic[S]):
    """All slots of a worker. Iterates over them, the longest open first."""

    def __init__(self, make: MakeSlot[S], max_slots: int, context_limit: int) -> None:
        self.max_slots = max_slots
        self.context_limit = context_limit
        self._make = make
        self._slots: dict[SlotKey, S] = {}

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._slots.values()))

    @property
    def num_in_use(self) -> int:
        return len(self._slots)

    @property
    def num_blocks_in_use(self) -> int:
        """Cache blocks that slots hold."""
        return 0

    @property
    def num_blocks_cached(self) -> int:
        """Cache blocks that no slot holds, kept for later prompts."""
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
    ) -> S:
        """A new slot; one of the same key is freed first. Nothing is cached yet, and no memory is promised.

        Raises InvalidRequest when it could never fit, Overloaded when every slot is in use; both with the numbers, and
        both leave an older slot of the same key as it was.
        """
        key = (owner, slot_id)
        self._check_lengths(len(committed_ids), num_prompt, params.max_tokens)
        self._check_memory(num_prompt + params.max_tokens)
        num_others = len(self._slots) - (key in self._slots)
        if num_others >= self.max_slots:
            raise Overloaded(f"all {self.max_slots} slots are in use; retry later or raise max_slots")
        if len(cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(
                f"cache_salt has {len(cache_salt)} bytes, at most {MAX_SALT_BYTES} are allowed", param="cache_salt"
            )
        if key in self._slots:
            self._slots.pop(key).make_way()
        slot = self._slots[key] = self._make(key, committed_ids, num_prompt, params, cache_salt)
        return slot

    def close(self, owner: int, slot_id: int) -> int:
        """Free the slot; returns its cache blocks. 0 when there is none: closing twice is no fault."""
        slot = self._slots.pop((owner, slot_id), None)
        return 0 if slot is None else slot.give_up()

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

    def _check_memory(self, max_len: int) -> None:
        """Raises InvalidRequest when a slot of so many tokens could never fit."""
