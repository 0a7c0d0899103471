"""The order of a round, before scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds import drafting
from gateway.rounds.decode_loop import Decoder
from gateway.rounds.session import Session
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.params import SamplingParams
from tests.unit.scripted_pool import connection_of, link_of, served_model

PROMPT = (5, 6, 7)
K = 2


class ScriptedTarget:
    """Keeps all that is drafted."""

    def __init__(self) -> None:
        vars(self).update(vars(connection_of()))

    def call(self, request: tpb.TargetRequest) -> asyncio.Future[tpb.TargetReply]:
        future = asyncio.get_running_loop().create_future()
        if request.WhichOneof("item") == "open":
            future.set_result(tpb.TargetReply(open={}))
            return future
        asked = request.verify
        future.set_result(
            tpb.TargetReply(
                verdict=tpb.Verdict(
                    committed_len=asked.base_len + len(asked.committed_ids),
                    token_ids=[9] * (asked.num_draft_tokens + 1),
                    kinds=[TokenKind.ACCEPTED.value] * asked.num_draft_tokens + [TokenKind.BONUS.value],
                    num_drafted=asked.num_draft_tokens,
                    num_accepted=asked.num_draft_tokens,
                )
            )
        )
        return future


class SilentDraft(ScriptedTarget):
    """Its proposals arrive at the target; its replies are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[asyncio.Future[Any]] = []

    def call(self, request: Any) -> asyncio.Future[Any]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]


async def test_tokens_leave_before_the_draft_s_reply_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "REPLY_GRACE_S", 3600.0)
    draft = SilentDraft()
    model = served_model({"target-0": link_of(ScriptedTarget())}, {"draft-0": link_of(draft)})
    options = SpeculationOptions(num_draft_tokens=K)
    request = GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=9), speculation=options)
    decoder = Decoder(model, Session(request, model.reference.tokenizer, 1), deadline_s=1e9)
    async with contextlib.aclosing(decoder.run()) as outputs, asyncio.timeout(10):
        assert len((await anext(outputs)).tokens) == K + 1
        second = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.05)
        assert not second.done(), "the next round is drafted for once the reply is here"
        draft.futures[-1].set_result(dpb.DraftReply(propose=dpb.ProposeReply(draft_ids=[9] * K)))
        output = await second
        assert (len(output.tokens), output.num_drafted) == (K + 1, K)
