"""What a draft knows of the tokens of its targets: each is asked for its tokenizer when the gateway pairs them.

On the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from draft_service.deliveries import TokenizerOf
from outrider.drafting.translation import Intersection, between
from outrider.engine.sampling.grammar import Grammars
from outrider.engine.worker.jobs import SlotVocabulary
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.log import get_logger
from outrider.wire.model_id import short_name
from outrider.wire.pair import has_same_tokens

log = get_logger(__name__)

Facts = Callable[[str], Awaitable[tuple[pb.WorkerInfo, TokenizerOf]]]
"""Asks the target at an address what it is. Raises grpc.aio.AioRpcError."""


class TargetVocabularies:
    """Of one draft, whose slots may be of targets of several vocabularies at once."""

    def __init__(self, own: pb.WorkerInfo, tokenizer: pb.TokenizerFiles, default: SlotVocabulary, facts: Facts) -> None:
        """own, tokenizer: the draft's. default: its own vocabulary."""
        self._own = own
        self._tokenizer_json = tokenizer.tokenizer_json
        self._default = default
        self._facts = facts
        self._of_targets: dict[str, tuple[int, SlotVocabulary]] = {}
        """By address: the target's epoch, and its vocabulary."""
        self._made: dict[tuple[str, int, tuple[int, ...]], asyncio.Task[SlotVocabulary | str]] = {}
        """By fingerprint, width and ends: what was made of it, or why it cannot be translated."""

    async def learn(self, address: str, target_epoch: int) -> str | None:
        """Learn what a target's tokens are. Return why the draft may not serve it; None where it may.

        Raises Unavailable while that cannot be told.
        """
        try:
            info, tokenizer_of = await self._facts(address)
            if info.epoch != target_epoch:
                raise Unavailable(f"the target at {address} was started anew", retry_after_s=1.0)
            found = await self._vocabulary(info, tokenizer_of)
        except grpc.aio.AioRpcError as error:
            why = f"the target at {address} does not say what its tokens are: {error.code().name}"
            raise Unavailable(why, retry_after_s=1.0) from None
        if isinstance(found, str):
            return found
        self._of_targets[address] = (target_epoch, found)
        return None

    def of(self, message: pb.OpenSlot) -> SlotVocabulary:
        """Return what the tokens of a slot are: the draft's own, unless its target was found to have others."""
        epoch, vocabulary = self._of_targets.get(message.deliver_to, (0, self._default))
        return vocabulary if epoch == message.target_epoch else self._default

    def infos(self) -> list[pb.Translation]:
        """Describe those that it translates for."""
        found = list[pb.Translation]()
        for (fingerprint, size, _), task in list(self._made.items()):
            made = task.result() if task.done() and not task.cancelled() and task.exception() is None else None
            if isinstance(made, SlotVocabulary) and isinstance(made.translation, Intersection):
                shared = {"num_shared": made.translation.num_shared, "share": made.translation.share}
                found.append(pb.Translation(tokenizer_fingerprint=fingerprint, vocab_size=size, **shared))
        return found

    async def _vocabulary(self, target: pb.WorkerInfo, tokenizer_of: TokenizerOf) -> SlotVocabulary | str:
        key = (target.tokenizer_fingerprint, target.vocab_size, tuple(target.eos_token_ids))
        if key == (self._own.tokenizer_fingerprint, self._own.vocab_size, self._default.eos_token_ids):
            return self._default
        task = self._made.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._made[key] = asyncio.create_task(self._make(target, tokenizer_of))
        return await asyncio.shield(task)  # who asked may not wait that long, and asks again

    async def _make(self, target: pb.WorkerInfo, tokenizer_of: TokenizerOf) -> SlotVocabulary | str:
        files = await tokenizer_of()
        return await asyncio.to_thread(self._translated, target, files.tokenizer_json)

    def _translated(self, target: pb.WorkerInfo, target_json: bytes) -> SlotVocabulary | str:
        """In a thread of its own."""
        own, ends = self._own, tuple(target.eos_token_ids)
        if has_same_tokens(own, target):  # which end an answer elsewhere
            grammars = Grammars(self._tokenizer_json, own.vocab_size, ends, must_follow=False)
            return SlotVocabulary(own.vocab_size, ends, grammars)
        sizes = (target.vocab_size, own.vocab_size)
        try:
            translation = between(target_json, self._tokenizer_json, *sizes, own.eos_token_ids)
        except ConfigError as error:
            return error.message
        except Exception as error:  # `tokenizers` has no type of its own for a file that it cannot read
            return f"the tokenizer of {short_name(target.model_id)} cannot be read: {error}"
        if isinstance(translation, Intersection):
            shared = f"{translation.num_shared} of {translation.num_texts} tokens"
            log.info("translating for %s: %s of the smaller vocabulary are one in both", target.model_id, shared)
        grammars = Grammars(target_json, target.vocab_size, ends, must_follow=False)
        return SlotVocabulary(target.vocab_size, ends, grammars, translation)
