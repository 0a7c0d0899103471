"""The SDK against the real system over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.client import (
    AsyncClient,
    Client,
    DraftLogprobs,
    FinishReason,
    Overloaded,
    Speculation,
    TokenKind,
)
from tests.e2e.reference import Answer, assert_target_alone, judge
from tests.stack import DEMO_TARGET, Stack, gateway_beside

PROMPT = "def read_file(path):\n    with open(path) as file:\n"
PATIENT = ("@gateway.planning.wait_budget.LEAST_WAIT_S=20", "@gateway.planning.wait_budget.MOST_WAIT_S=20")
"""No proposal is late, so that under `rejection` a seed gives the same text again."""


@pytest.fixture(scope="module")
def patient(stack: Stack) -> Iterator[str]:
    """gRPC address of another gateway before the same workers."""
    with gateway_beside(stack, *PATIENT) as gateway:
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


async def test_a_streamed_answer_comes_round_by_round(patient: str, expected: Answer) -> None:
    async with AsyncClient(patient) as client, client.stream(PROMPT, max_tokens=64, temperature=0.0) as stream:
        rounds = [each async for each in stream]
    assert [token.id for each in rounds for token in each.tokens] == expected.ids
    assert len({each.request_id for each in rounds}) == 1
    for each in rounds[:-1]:
        assert each.finish_reason is None
        assert each.usage is None
        assert len(each.tokens) == each.num_accepted + 1
        assert each.timings.total_s > 0
        last = each.tokens[-1].kind
        if each.num_drafted:
            assert last is (TokenKind.BONUS if each.num_accepted == each.num_drafted else TokenKind.RECOVERED)
        else:
            assert last is TokenKind.PLAIN
    assert rounds[-1].usage is not None
    assert rounds[-1].usage.num_draft_tokens == sum(each.num_drafted for each in rounds)


@pytest.mark.parametrize("draft_logprobs", list(DraftLogprobs))
def test_answers_differ_under_one_seed_and_come_back_with_it(patient: str, draft_logprobs: DraftLogprobs) -> None:
    speculation = Speculation(num_draft_tokens=4, draft_logprobs=draft_logprobs)
    options: Any = {"max_tokens": 32, "temperature": 1.0, "seed": 11, "n": 3, "speculation": speculation}
    with Client(patient) as client:
        first = client.generate(PROMPT, **options)
        again = client.generate(PROMPT, **options)
        drawn = client.generate(PROMPT, max_tokens=32, temperature=1.0)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in again.choices] == texts
    assert first.usage.seed == 11
    assert first.usage.num_accepted_tokens > 0
    assert drawn.usage.seed != 0


def test_stops_by_string_by_id_and_by_end_of_sequence(patient: str, expected: Answer) -> None:
    with Client(patient) as client:
        whole = client.generate(PROMPT, max_tokens=64, temperature=0.0).text
        stop = whole[20:27]
        by_string = client.generate(PROMPT, max_tokens=64, temperature=0.0, stop=stop).choices[0]
        stop_id = expected.ids[9]
        by_id = client.generate(PROMPT, max_tokens=64, temperature=0.0, stop_token_ids=[stop_id]).choices[0]
        ending = client.generate('if __name__ == "__main__":\n    unittest.main()\n', temperature=0.0).choices[0]
    assert (by_string.text, by_string.stop_reason) == (whole[: whole.index(stop)], stop)
    assert [token.id for token in by_id.tokens] == expected.ids[: expected.ids.index(stop_id) + 1]
    assert by_id.stop_reason == str(stop_id)
    assert [token.id for token in ending.tokens] == [0]
    assert (ending.text, ending.stop_reason) == ("", None)
    assert {by_string.finish_reason, by_id.finish_reason, ending.finish_reason} == {FinishReason.STOP}


def test_many_threads_share_one_client(patient: str, expected: Answer) -> None:
    with Client(patient) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.generate(PROMPT, max_tokens=64, temperature=0.0), range(8)))
    outputs = [(PROMPT, [token.id for token in answer.choices[0].tokens]) for answer in answers]
    assert all(len(ids) == 64 for _, ids in outputs)
    assert_target_alone(DEMO_TARGET, *outputs)


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


async def test_overload_says_when_to_come_back_and_retries_get_in(stack: Stack) -> None:
    options: Any = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True}
    with gateway_beside(stack, "--max-running", "1", "--max-queue", "1") as gateway:
        address = str(gateway.ready["grpc"])
        async with AsyncClient(address, retries=0) as client:
            tried = [client.generate(PROMPT, **options) for _ in range(6)]
            results = await asyncio.gather(*tried, return_exceptions=True)
        refused = [each for each in results if isinstance(each, Overloaded)]
        assert 1 <= len(refused) <= 4
        assert all(error.retry_after_s == 1.0 for error in refused)
        assert len(refused) + sum(not isinstance(each, BaseException) for each in results) == 6
        async with AsyncClient(address, retries=20) as client:
            served = await asyncio.gather(*(client.generate(PROMPT, **options) for _ in range(5)))
        assert [each.usage.num_completion_tokens for each in served] == [120] * 5
