"""The SDK against the real system over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from outrider.client import (
    AsyncClient,
    Client,
    FinishReason,
    TokenKind,
)
from tests.e2e.reference import Answer, judge
from tests.stack import DEMO_TARGET, Stack, gateway_beside

PROMPT = "def read_file(path):\n    with open(path) as file:\n"


@pytest.fixture(scope="module")
def patient(stack: Stack) -> Iterator[str]:
    """gRPC address of another gateway before the same workers, that lets draft and target take turns: no draft is late,
    so that under `rejection` a seed gives the same text again.
    """
    with gateway_beside(stack, module="tests.turns_gateway") as gateway:
        yield str(gateway.ready["grpc"])


@pytest.fixture(scope="module")
def expected() -> Answer:
    return judge(DEMO_TARGET, generate=[PROMPT], max_tokens=64).answers[0]


def test_a_whole_answer_from_the_blocking_client(patient: str, expected: Answer) -> None:
    with Client(patient) as client:
        answer = client.generate(PROMPT, max_tokens=64, temperature=0.0)
    (choice,) = answer.choices
    assert [token.id for token in choice.tokens] == expected.ids
    assert choice.finish_reason is FinishReason.LENGTH
    assert "".join(token.text for token in choice.tokens) == answer.text
    usage = answer.usage
    assert usage.num_prompt_tokens == len(expected.prompt_ids)
    assert usage.num_completion_tokens == 64
    kinds = [token.kind for token in choice.tokens]
    assert kinds.count(TokenKind.RECOVERED) + kinds.count(TokenKind.BONUS) <= usage.num_rounds
    assert kinds.count(TokenKind.PLAIN) == usage.num_plain_steps
    assert 0 < kinds.count(TokenKind.ACCEPTED) <= usage.num_accepted_tokens
    assert usage.acceptance_rate == usage.num_accepted_tokens / usage.num_draft_tokens


async def test_leaving_a_stream_frees_both_workers_at_once(stack: Stack, patient: str) -> None:
    async with AsyncClient(patient) as client, client.stream(PROMPT, max_tokens=1900, ignore_eos=True) as rounds:
        await anext(rounds)
        await anext(rounds)
        assert stack.target_info().num_slots_in_use == stack.draft_info().num_slots_in_use == 1
    left_s = time.monotonic()
    while stack.target_info().num_slots_in_use or stack.draft_info().num_slots_in_use:
        assert time.monotonic() - left_s < 5.0
        await asyncio.sleep(0.02)
    assert stack.target_info().num_kv_blocks_in_use == stack.draft_info().num_kv_blocks_in_use == 0
