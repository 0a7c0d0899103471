"""The vocabularies of a draft's targets: each target's tokenizer is read when the gateway pairs them.

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

log = get_logger(__name__)

Facts = Callable[[str], Awaitable[tuple[pb.WorkerInfo, TokenizerOf]]]
"""Reads the info of the target at an address. Raises grpc.aio.AioRpcError."""


class TargetVocabularies:
    """The vocabularies that the slots of one draft speak, which may be several at once."""

    def __init__(self, own: pb.WorkerInfo, tokenizer: pb.TokenizerFiles, default: SlotVocabulary, facts: Facts) -> None:
        """own, tokenizer: the draft's. default: its own vocabulary."""
        self._own = own
        self._tokenizer_json = tokenizer.tokenizer_json
        self._default = default
        self._facts = facts
        self._of_targets: dict[str, tuple[int, SlotVocabulary]] = {}
        """By address: the target's epoch, and its vocabulary."""
        self._made: dict[tuple[str, int, tuple[int, ...]], asyncio.Task[SlotVocabulary]] = {}
        """By fingerprint, width and end-of-sequence ids."""

    async def learn(self, address: str, target_epoch: int) -> str | None:
        """Learn what a target's tokens are. Return why the draft may not serve it; None where it may.

        Raises Unavailable while that cannot be known.
        """
        try:
            info, tokenizer_of = await self._facts(address)
            if info.epoch != target_epoch:
                raise Unavailable(f"the target at {address} was started anew", retry_after_s=1.0)
            found = await self._vocabulary(info, tokenizer_of)
        except grpc.aio.AioRpcError as error:
            why = f"the target at {address} does not say what its tokens are: {error.code().name}"
            raise Unavailable(why, retry_after_s=1.0) from None
        except ConfigError as error:
            return error.message
        self._of_targets[address] = (target_epoch, found)
        return None

    def of(self, message: pb.OpenSlot) -> SlotVocabulary:
        """Return the vocabulary of a slot: the draft's own, unless its target was found to have another."""
        epoch, vocabulary = self._of_targets.get(message.deliver_to, (0, self._default))
        return vocabulary if epoch == message.target_epoch else self._default

    def infos(self) -> list[pb.Translation]:
        """Describe those that it translates for."""
        found = list[pb.Translation]()
        for (fingerprint, size, _), task in list(self._made.items()):
            if not task.done() or task.cancelled() or task.exception() is not None:
                continue
            translation = task.result().translation
            if isinstance(translation, Intersection):
                shared = {"num_shared": translation.num_shared, "share": translation.share}
                found.append(pb.Translation(tokenizer_fingerprint=fingerprint, vocab_size=size, **shared))
        return found

    async def _vocabulary(self, target: pb.WorkerInfo, tokenizer_of: TokenizerOf) -> SlotVocabulary:
        key = (target.tokenizer_fingerprint, target.vocab_size, tuple(target.eos_token_ids))
        if key == (self._own.tokenizer_fingerprint, self._own.vocab_size, self._default.eos_token_ids):
            return self._default
        task = self._made.get(key)
        if task is None or _is_unanswered(task):
            task = self._made[key] = asyncio.create_task(self._make(target, tokenizer_of))
        return await asyncio.shield(task)  # a caller may not wait that long, and calls again

    async def _make(self, target: pb.WorkerInfo, tokenizer_of: TokenizerOf) -> SlotVocabulary:
        files = await tokenizer_of()
        return await asyncio.to_thread(self._translated, target, files.tokenizer_json)

    def _translated(self, target: pb.WorkerInfo, target_json: bytes) -> SlotVocabulary:
        """Make the vocabulary of a target. In a thread of its own. Raises ConfigError where nothing translates."""
        own = self._own
        sizes = (target.vocab_size, own.vocab_size)
        try:
            translation = between(target_json, self._tokenizer_json, *sizes, own.eos_token_ids)
        except ConfigError:
            raise
        except Exception as error:  # `tokenizers` has no type of its own for a file that it cannot read
            why = f"the tokenizer of {short_name(target.model_id)} cannot be read: {error}"
            raise ConfigError(why) from None
        if isinstance(translation, Intersection):
            shared = f"{translation.num_shared} of {translation.num_texts} tokens"
            log.info("translating for %s: %s of the smaller vocabulary are one in both", target.model_id, shared)
        ends = tuple(target.eos_token_ids)
        grammars = Grammars(target_json, target.vocab_size, ends, must_follow=False)
        return SlotVocabulary(target.vocab_size, ends, grammars, translation)


def _is_unanswered(task: asyncio.Task[SlotVocabulary]) -> bool:
    """Return whether the target did not send its tokenizer, which it may another time."""
    return task.done() and (task.cancelled() or isinstance(task.exception(), grpc.aio.AioRpcError))
