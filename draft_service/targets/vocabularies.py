"""The vocabularies of a draft worker's targets. A target's tokenizer is read when the gateway pairs the two.

Runs on the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from outrider.drafting.translation import Intersection, create_translation
from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.worker.jobs import SlotVocabulary
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.models.model_id import short_name
from outrider.wire.peer_text import bound_strings
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

READ_S = 60.0
"""Maximum seconds for each of two replies of a target: the one with its description, and the one with its tokenizer."""

Key = tuple[str, int, tuple[int, ...]]
"""Identity of a vocabulary: the tokenizer's fingerprint, the width of the logits, and the end-of-sequence ids."""


class TargetVocabularies:
    """Vocabularies of the targets that a draft worker drafts for. Each slot has the vocabulary of its target."""

    def __init__(
        self,
        own: pb.WorkerInfo,
        tokenizer: pb.TokenizerFiles,
        default: SlotVocabulary,
        stub_of: Callable[[str], target_pb2_grpc.TargetServiceStub],
    ) -> None:
        """Create an empty collection. `own`, `tokenizer`: description and tokenizer of the draft worker. `default`: the
        draft worker's own vocabulary. `stub_of`: function that returns a stub for the target at an address.
        """
        self._own = own
        self._tokenizer_json = tokenizer.tokenizer_json
        self._default = default
        self._stub_of = stub_of
        self._of_targets: dict[str, tuple[int, SlotVocabulary]] = {}
        """Epoch and vocabulary by the target's address."""
        self._made: dict[Key, asyncio.Task[SlotVocabulary]] = {}
        self.infos: list[pb.SharedVocabulary] = []
        """Descriptions of the target vocabularies to which the draft worker translates by tokens that both vocabularies
        have."""

    async def learn(self, address: str, target_epoch: int) -> None:
        """Ask a target for its vocabulary. If that differs from the draft worker's, prepare a translation between the
        two.

        Raises `ConfigError` if no translation is possible, and `Unavailable` if the target cannot be called now.
        """
        try:
            info: pb.WorkerInfo = await self._stub_of(address).GetInfo(pb.GetInfoRequest(), timeout=READ_S)
            bound_strings(info)
            if info.epoch != target_epoch:
                raise Unavailable(f"the target at {address} was started anew", retry_after_s=1.0)
            vocabulary = await self._vocabulary(address, info)
        except grpc.aio.AioRpcError as error:
            why = f"the target at {address} does not say what its tokens are: {error.code().name}"
            raise Unavailable(why, retry_after_s=1.0) from None
        self._of_targets[address] = (target_epoch, vocabulary)

    def of(self, message: pb.OpenSlot) -> SlotVocabulary:
        """Return the vocabulary of a slot that is to be opened: the vocabulary that `learn` read from the slot's
        target, or the draft worker's own if none was read in the target's present epoch.
        """
        epoch, vocabulary = self._of_targets.get(message.target_address, (None, self._default))
        if epoch != message.target_epoch:
            return self._default
        return vocabulary

    async def _vocabulary(self, address: str, target: pb.WorkerInfo) -> SlotVocabulary:
        key = (target.tokenizer_fingerprint, target.vocab_size, tuple(target.eos_token_ids))
        if key == (self._own.tokenizer_fingerprint, self._own.vocab_size, self._default.eos_token_ids):
            return self._default
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._make(key, address, target))
        return await asyncio.shield(self._made[key])  # a caller may stop waiting earlier, and calls again

    async def _make(self, key: Key, address: str, target: pb.WorkerInfo) -> SlotVocabulary:
        try:
            files = await self._stub_of(address).GetTokenizer(pb.GetTokenizerRequest(), timeout=READ_S)
        except grpc.aio.AioRpcError:
            del self._made[key]  # the target may answer another time
            raise
        except asyncio.CancelledError:  # calls end so when their channel is closed
            del self._made[key]
            why = f"the connection to the target at {address} was closed while it said what its tokens are"
            raise Unavailable(why, retry_after_s=1.0) from None
        vocabulary = await asyncio.to_thread(self._translated, target, files.tokenizer_json)
        translation = vocabulary.translation
        if isinstance(translation, Intersection):
            what = "translating for %s: %d of %d tokens of the smaller vocabulary are one in both"
            log.info(what, target.model_id, translation.num_shared, translation.num_texts)
            info = pb.SharedVocabulary(
                num_shared=translation.num_shared,
                shared_fraction=translation.shared_fraction,
                tokenizer_fingerprint=target.tokenizer_fingerprint,
                vocab_size=target.vocab_size,
            )
            self.infos.append(info)
        return vocabulary

    def _translated(self, target: pb.WorkerInfo, target_json: bytes) -> SlotVocabulary:
        # Runs in a thread of its own, since it takes about a second.
        own = self._own
        try:
            translation = create_translation(
                target_json, self._tokenizer_json, target.vocab_size, own.vocab_size, own.eos_token_ids
            )
        except ConfigError:
            raise
        except Exception as error:  # `tokenizers` has no type of its own for a file that it cannot read
            why = f"the tokenizer of {short_name(target.model_id)} cannot be read: {error}"
            raise ConfigError(why) from None
        ends = tuple(target.eos_token_ids)
        grammars = Grammars(target_json, target.vocab_size, ends, must_follow=False)
        return SlotVocabulary(target.vocab_size, ends, grammars, translation)
