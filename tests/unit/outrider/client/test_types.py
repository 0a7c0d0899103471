"""What answers and parameters are in a caller's hands."""

from __future__ import annotations

import pytest

from outrider.client import (
    AsyncClient,
    FinishReason,
    RoundTimings,
    StructuredOutputs,
    TokenKind,
)
from outrider.v1 import gateway_pb2 as pb
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
