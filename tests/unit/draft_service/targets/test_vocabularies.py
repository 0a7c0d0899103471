"""What a draft takes the tokens of a slot for: its target's, with the target's ends."""

import asyncio
from pathlib import Path

import pytest

from draft_service.targets.vocabularies import TargetVocabularies
from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.worker.jobs import SlotVocabulary
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import Unavailable
from tests.stack import DEMO_TARGET

ADDRESS = "127.0.0.1:7"
TOKENIZER_JSON = Path(DEMO_TARGET, "tokenizer.json").read_bytes()


async def test_a_draft_of_the_same_tokens_ends_where_its_target_does() -> None:
    files = pb.TokenizerFiles(tokenizer_json=TOKENIZER_JSON)
    own = pb.WorkerInfo(vocab_size=5000, tokenizer_fingerprint="f", eos_token_ids=[0], supports_retokenization=True)
    default = SlotVocabulary(5000, (0,), Grammars(TOKENIZER_JSON, 5000, (0,), must_follow=False))
    ends: list[int] = []
    epoch = 1
    is_closed = False

    class Target:
        async def GetInfo(self, request: pb.GetInfoRequest, **options: float) -> pb.WorkerInfo:
            return pb.WorkerInfo(epoch=epoch, vocab_size=5000, tokenizer_fingerprint="f", eos_token_ids=ends)

        async def GetTokenizer(self, request: pb.GetTokenizerRequest, **options: float) -> pb.TokenizerFiles:
            if is_closed:
                raise asyncio.CancelledError
            return files

    vocabularies = TargetVocabularies(own, files, default, lambda address: Target())  # type: ignore[arg-type,return-value]
    slot = pb.OpenSlot(target_address=ADDRESS, target_epoch=1)
    ends[:] = [0]
    await vocabularies.learn(ADDRESS, 1)
    assert vocabularies.of(slot) is default
    ends[:] = [0, 5]
    is_closed = True
    with pytest.raises(Unavailable, match="was closed while it said what its tokens are"):
        await vocabularies.learn(ADDRESS, 1)
    is_closed = False
    await vocabularies.learn(ADDRESS, 1)
    found = vocabularies.of(slot)
    assert (found.size, found.eos_token_ids, found.translation) == (5000, (0, 5), None)
    assert vocabularies.infos == [], "nothing is translated"
    epoch = 2
    await vocabularies.learn(ADDRESS, 2)
    assert vocabularies.of(slot) is default, "that life is over"
    assert vocabularies.of(pb.OpenSlot(target_address=ADDRESS, target_epoch=2)) is found
    assert len(vocabularies._of_targets) == 1
