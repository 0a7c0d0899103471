"""What answers and parameters are in a caller's hands."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from outrider.client import (
    AsyncClient,
    FinishReason,
    RoundTimings,
    StructuredOutputs,
    TokenKind,
    TokenLogprobs,
)
from outrider.v1 import common_pb2
from outrider.v1 import gateway_pb2 as pb
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, rounds


async def test_choices_are_kept_apart_and_usage_is_summed(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        completion = await client.generate("hello", n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.text for choice in completion.choices] == [TEXT] * 3
    assert completion.choices[1].finish_reason is FinishReason.LENGTH
    assert completion.choices[1].stop_reason is None
    assert completion.usage.num_completion_tokens == 21
    assert completion.usage.num_draft_tokens == 15
    assert completion.usage.num_prompt_tokens == 4  # once, as OpenAI counts it
    assert completion.usage.num_cached_prompt_tokens == 3
    assert completion.usage.num_accepted_prediction_tokens == 6
    assert completion.usage.num_rejected_prediction_tokens == 3


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


async def test_logprobs_arrive(gateway: ScriptedGateway) -> None:
    message = rounds()[-1]
    message.tokens[0].logprobs.CopyFrom(
        common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[7, 9], top_logprobs=[-0.5, -1.25])
    )

    async def script(request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        yield message

    gateway.scripts.append(script)
    async with AsyncClient(gateway.address) as client:
        completion = await client.generate("hello", num_logprobs=2)
    assert completion.choices[0].tokens[0].logprobs == TokenLogprobs(-0.5, ((7, -0.5), (9, -1.25)))
    assert gateway.requests[0].params.num_logprobs == 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (
            StructuredOutputs(json={"type": "null"}, strict=True),
            pb.StructuredOutputs(json='{"type": "null"}', strict=True),
        ),
        (StructuredOutputs(json='{"é": 1}'), pb.StructuredOutputs(json='{"é": 1}')),
        (StructuredOutputs(json=False), pb.StructuredOutputs(json="false")),
        (StructuredOutputs(regex="a+"), pb.StructuredOutputs(regex="a+")),
        (StructuredOutputs(choice=("a", "b")), pb.StructuredOutputs(choice=pb.Choices(texts=["a", "b"]))),
        (StructuredOutputs(grammar="g"), pb.StructuredOutputs(grammar="g")),
        (StructuredOutputs(json_object=True), pb.StructuredOutputs(json_object=True)),
    ],
)
async def test_structured_outputs(
    gateway: ScriptedGateway, given: StructuredOutputs, sent: pb.StructuredOutputs
) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello", structured_outputs=given)
    assert gateway.requests[0].structured_outputs == sent
