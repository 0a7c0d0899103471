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
    ConfigError,
    DeadlineExceeded,
    DraftLogprobs,
    FinishReason,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Speculation,
    TokenKind,
    Unavailable,
)
from tests.e2e.reference import Answer, assert_target_alone, judge
from tests.stack import DEMO_TARGET, Process, Stack

PROMPT = "def read_file(path):\n    with open(path) as file:\n"
PATIENT = ("--wait-budget-min-ms", "20000", "--wait-budget-max-ms", "20000")
"""No proposal is late, so that under `rejection` a seed gives the same text again."""


def gateway_of(stack: Stack, *options: str) -> Process:
    assert stack.draft is not None
    workers = ("--target", stack.target.address, "--draft", stack.draft.address)
    return Process("gateway", [*workers, "--port", "0", "--grpc-port", "0", *options])


@pytest.fixture(scope="module")
def patient(stack: Stack) -> Iterator[str]:
    """gRPC address of another gateway before the same workers."""
    gateway = gateway_of(stack, *PATIENT)
    yield str(gateway.ready["grpc"])
    gateway.stop()


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


def test_a_drawn_seed_can_be_used_again(patient: str) -> None:
    options: Any = {"max_tokens": 32, "temperature": 1.0, "speculation": Speculation(num_draft_tokens=4)}
    with Client(patient) as client:
        drawn = client.generate(PROMPT, **options)
        assert client.generate(PROMPT, **options, seed=drawn.usage.seed).text == drawn.text


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


def test_ids_and_chats_go_in_too(patient: str, expected: Answer) -> None:
    with Client(patient) as client:
        by_ids = client.generate(prompt_ids=expected.prompt_ids, max_tokens=64, temperature=0.0)
        chat = client.generate(messages=[{"role": "user", "content": "def add(a, b):"}], max_tokens=8, temperature=0.0)
    assert [token.id for token in by_ids.choices[0].tokens] == expected.ids
    assert chat.usage.num_completion_tokens == 8
    assert chat.usage.num_prompt_tokens > 4


def test_logprobs_name_the_best_tokens(patient: str) -> None:
    """Their values are compared with transformers' in test_openai_client.py."""
    with Client(patient) as client:
        tokens = client.generate(PROMPT, max_tokens=16, temperature=0.0, num_logprobs=4).choices[0].tokens
    for token in tokens:
        assert token.logprobs is not None
        assert len(token.logprobs.top) == 4
        assert token.logprobs.top[0] == (token.id, token.logprobs.logprob)  # greedy takes the best
        values = [value for _, value in token.logprobs.top]
        assert values == sorted(values, reverse=True)


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


def test_models(patient: str, stack: Stack) -> None:
    with Client(patient) as client:
        (model,) = client.models()
        assert client.generate(PROMPT, model=model.id, max_tokens=1).usage.num_completion_tokens == 1
    assert model.context_limit == 2048
    assert model.vocab_size == 4096
    assert model.draft_id == stack.draft_info().model_id


def test_each_refusal_is_an_error_of_its_own(patient: str) -> None:
    with Client(patient) as client:
        with pytest.raises(ModelNotFound) as unknown:
            client.generate(PROMPT, model="gpt-4")
        assert unknown.value.param == "model"
        with pytest.raises(InvalidRequest) as too_long:
            client.generate(PROMPT, max_tokens=2048)
        assert too_long.value.param == "max_tokens"
        assert "2048" in too_long.value.message
        with pytest.raises(InvalidRequest) as out_of_range:
            client.generate(PROMPT, top_p=1.5)
        assert out_of_range.value.param == "top_p"
        with pytest.raises(DeadlineExceeded):
            client.generate(PROMPT, max_tokens=1900, ignore_eos=True, speculation=False, timeout_s=0.5)
    with Client("127.0.0.1:9", retries=0) as client, pytest.raises(Unavailable, match="no gateway answers at"):
        client.generate(PROMPT)
    with pytest.raises(ConfigError):
        Client("http://127.0.0.1:9")


async def test_overload_says_when_to_come_back_and_retries_get_in(stack: Stack) -> None:
    gateway = gateway_of(stack, "--max-running", "1", "--max-queue", "1")
    address = str(gateway.ready["grpc"])
    options: Any = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True}
    try:
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
    finally:
        gateway.stop()
