"""The gateway's messages as the SDK's values."""

from __future__ import annotations

import pytest

from outrider.client import (
    AsyncClient,
    FinishReason,
    RoundTimings,
    TokenKind,
)
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
