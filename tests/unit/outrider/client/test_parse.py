"""The gateway's messages as the SDK's values."""

import pytest

from outrider.client import AsyncClient, FinishReason, RoundTimings, TokenKind
from outrider.client.parse import parse_model, parse_round
from outrider.client.types import DraftToken, DraftTokenKind, RankedToken, TokenLogprobs
from outrider.v1 import common_pb2
from outrider.v1 import gateway_pb2 as pb
from outrider.wire.errors import OutriderError
from outrider.wire.requests.drafters import Drafter
from tests.unit.outrider.client.scripted_gateway import ScriptedGateway


async def test_stream_gives_rounds_with_their_figures(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client, client.stream("hello") as stream:
        seen = [round_ async for round_ in stream]
    assert [(round_.num_drafted, round_.num_accepted) for round_ in seen] == [(3, 2), (2, 2), (0, 0)]
    assert [round_.text_delta for round_ in seen] == [" the quick red", " fox ran!", "\n"]
    assert [round_.usage is None for round_ in seen] == [True, True, False]
    assert [round_.finish_reason for round_ in seen] == [None, None, FinishReason.STOP]
    assert seen[0].tokens[2].kind is TokenKind.RECOVERED
    assert seen[0].timings == RoundTimings(
        total_s=pytest.approx(0.004),
        deliver_s=pytest.approx(0.002),
        verify_s=pytest.approx(0.00175),
        overhead_s=pytest.approx(0.00025),
    )


def test_what_is_absent_is_none_and_0_is_0() -> None:
    bare = parse_round(pb.GenerateResponse(tokens=[pb.GeneratedToken(id=5, kind=common_pb2.TOKEN_KIND_PLAIN)]))
    assert (bare.usage, bare.explanation, bare.score, bare.stop_reason) == (None, None, None, None)
    assert bare.tokens[0].logprobs is None
    logprobs = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[5, 6], top_logprobs=[-0.5, -1.0])
    token = pb.GeneratedToken(id=5, kind=common_pb2.TOKEN_KIND_PLAIN, logprobs=logprobs)
    full = parse_round(pb.GenerateResponse(tokens=[token], score=0.0, usage=pb.Usage(lenience=0.0)))
    assert full.tokens[0].logprobs == TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0)))
    assert full.score == 0.0 and full.usage is not None and full.usage.lenience == 0.0


def test_an_explanation_has_seconds_and_what_was_rejected() -> None:
    ranked = common_pb2.RankedToken
    verified = common_pb2.Explanation(
        draft=[
            common_pb2.DraftToken(
                id=7, text="a", parent=0, is_accepted=True, kind=common_pb2.DRAFT_TOKEN_KIND_DETERMINISTIC
            )
        ],
        rejection=common_pb2.Rejection(parent=1, token=ranked(id=8), target=[ranked(id=9, text="b", logprob=-0.25)]),
        draft_us=1500,
    )
    explained = pb.RoundExplanation(committed_len=3, batch_size=2, verified=verified, queue_us=500_000)
    found = parse_round(pb.GenerateResponse(explanation=explained)).explanation
    assert found is not None and found.rejection is not None
    assert found.draft == (DraftToken(7, "a", 0, True, DraftTokenKind.GUESS),)
    assert (found.rejection.parent, found.rejection.token) == (1, RankedToken(8, "", None))
    assert found.rejection.target == (RankedToken(9, "b", -0.25),)
    assert (found.drafter, found.draft_s, found.queue_s) == (None, pytest.approx(0.0015), 0.5)


def test_a_newer_gateways_kinds_are_refused_and_its_drafters_left_out() -> None:
    newer = common_pb2.DraftToken(kind=99)  # type: ignore[arg-type]
    explained = pb.RoundExplanation(verified=common_pb2.Explanation(draft=[newer]))
    with pytest.raises(OutriderError, match="unknown kind 99 of a draft token from the gateway; upgrade this client"):
        parse_round(pb.GenerateResponse(explanation=explained))
    model = parse_model(pb.Model(id="m", drafters=["oracle", "ngram", "model"]))
    assert set(model.drafters) == {Drafter.MODEL, Drafter.NGRAM} and model.draft_id is None
