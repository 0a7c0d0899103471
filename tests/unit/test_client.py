"""The SDK against a real gRPC server on port 0, and through its transport seam."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider.client
from outrider.client import (
    AsyncClient,
    Client,
    Completion,
    Drafter,
    DraftLogprobs,
    FinishReason,
    GrpcTransport,
    Model,
    RetryPolicy,
    RoundTimings,
    Speculation,
    StructuredOutputs,
    TokenKind,
    TokenLogprobs,
    Usage,
)
from outrider.client.llm_inputs import max_choices, read_chats, read_prompts, read_sampling
from outrider.client.usage import PLAIN_ADVICE
from outrider.v1 import common_pb2
from outrider.v1 import gateway_pb2 as pb
from outrider.wire import errors
from outrider.wire.telemetry.metrics import PLAIN_REASONS
from outrider.wire.transport.serving import ServerThread
from tests.unit.scripted_gateway import TEXT, ScriptedGateway, failing, hanging, rounds, serving

FAST = RetryPolicy(retries=2, backoff_s=0.01)


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with serving() as scripted:
        yield scripted


def eventually(event: threading.Event) -> bool:
    return event.wait(5)


# ---- answers


async def test_generate_returns_the_whole_answer_typed(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        completion = await client.generate("hello")
    assert completion.text == TEXT
    assert completion.request_id == "r-1"
    (choice,) = completion.choices
    assert [token.id for token in choice.tokens] == [1, 2, 3, 4, 5, 6, 7]
    assert [token.kind.value for token in choice.tokens] == [
        *("accepted", "accepted", "recovered"),
        *("accepted", "accepted", "bonus"),
        "plain",
    ]
    assert choice.finish_reason is FinishReason.STOP
    assert choice.stop_reason == "END"
    assert choice.usage.acceptance_rate == 4 / 5
    assert choice.usage.mean_accepted_length == 1 + 4 / 2
    assert choice.usage.tokens_per_target_pass == 7 / 3
    assert choice.usage.num_wasted_tokens == 3
    assert choice.usage.seed == 2**63 + 5
    assert choice.usage.num_cached_prompt_tokens == 3


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


def test_rates_are_absent_when_nothing_was_drafted() -> None:
    usage = Usage(4, 7, 0, 0, 0, 7, 0, 0)
    assert usage.acceptance_rate is None
    assert usage.mean_accepted_length is None
    assert usage.tokens_per_target_pass == 1.0


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


async def test_models(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        assert await client.models() == (
            Model("pair", 512, 4096, "small", (Drafter.MODEL,)),
            Model("guessed", 512, 4096, "ngram", (Drafter.NGRAM,)),
            Model("alone", 256, 4096, None),
        )


# ---- requests


async def test_every_parameter_reaches_the_gateway(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate(
            "grüße",
            model="pair",
            max_tokens=9,
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            logit_bias={5: -100.0},
            bad_words=["damn", [8, 9]],
            min_tokens=2,
            seed=2**64 - 1,
            stop_token_ids=[3],
            ignore_eos=True,
            num_logprobs=0,
            n=2,
            stop="END",
            speculation=Speculation(num_draft_tokens=0, draft_logprobs=DraftLogprobs.TOPK, draft_topk=64),
            cache_salt="salz",
            user="somebody",
            prediction="größe",
            priority=-7,
            max_tpot_ms=12.5,
        )
    assert gateway.requests[0] == pb.GenerateRequest(
        model="pair",
        prompt="grüße",
        params=common_pb2.SamplingParams(
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            logit_bias={5: -100.0},
            bad_words=[common_pb2.TokenSequence(ids=[8, 9])],
            min_tokens=2,
            seed=2**64 - 1,
            max_tokens=9,
            stop_token_ids=[3],
            ignore_eos=True,
            num_logprobs=0,
        ),
        has_seed=True,
        num_choices=2,
        stop=["END"],
        speculation=pb.SpeculationOptions(
            enabled=True,
            num_draft_tokens=common_pb2.NumDraftTokens(number=0),
            draft_logprobs=common_pb2.DRAFT_LOGPROBS_TOPK,
            draft_topk=64,
        ),
        bad_words=["damn"],
        cache_salt="salz",
        user="somebody",
        prediction="größe",
        priority=-7,
        max_tpot_ms=12.5,
    )


async def test_enums_may_be_given_by_name(gateway: ScriptedGateway) -> None:
    named = Speculation(acceptance="coupled", drafter="ngram+model", draft_logprobs="full")
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello", speculation=named)
    (request,) = gateway.requests
    assert request.speculation.acceptance == common_pb2.ACCEPTANCE_RULE_COUPLED
    assert request.speculation.drafter == "ngram+model"
    assert request.speculation.draft_logprobs == common_pb2.DRAFT_LOGPROBS_FULL


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


async def test_what_is_not_given_is_absent(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello")
        await client.generate(prompt_ids=[4, 5], speculation=False, stop=["a", "b"])
        await client.generate(messages=[{"role": "user", "content": "hi"}])
    text, ids, chat = gateway.requests
    assert not text.has_seed and not text.HasField("structured_outputs")
    assert not text.params.HasField("num_logprobs")
    assert not text.speculation.HasField("num_draft_tokens")
    assert text.params.temperature == 1.0
    assert text.params.max_tokens == 16
    assert (list(ids.prompt_ids.ids), ids.speculation.enabled, list(ids.stop)) == ([4, 5], False, ["a", "b"])
    assert chat.WhichOneof("input") == "chat"
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"n": 129}, "n"),
        ({"bad_words": [["x"]]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"stop": ["a", 5]}, "stop"),
        ({"cache_salt": "ö" * 129}, "cache_salt"),
        ({"cache_salt": b"\xff"}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"max_tpot_ms": 0}, "max_tpot_ms"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"speculation": Speculation(num_draft_tokens=-1)}, "speculation.num_draft_tokens"),
        ({"speculation": Speculation(acceptance="typical")}, "speculation.acceptance"),
        ({"speculation": Speculation(lenience=True)}, "speculation.lenience"),
        ({"speculation": Speculation(tree=4)}, "speculation.tree"),  # type: ignore[arg-type]
        ({"speculation": {"num_draft_tokens": 4}}, "speculation"),
        ({"prompt_ids": [1]}, "prompt"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs()}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(regex="a", json_object=True)}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(json={"const": math.nan})}, "structured_outputs.json"),
        ({"structured_outputs": StructuredOutputs(json={"const": b""})}, "structured_outputs.json"),
        ({"structured_outputs": StructuredOutputs(regex=5)}, "structured_outputs.regex"),  # type: ignore[arg-type]
        ({"structured_outputs": StructuredOutputs(choice=["a", 1])}, "structured_outputs.choice"),  # type: ignore[list-item]
        ({"structured_outputs": StructuredOutputs(choice="ab")}, "structured_outputs.choice"),
        ({"structured_outputs": StructuredOutputs(choice=5)}, "structured_outputs.choice"),  # type: ignore[arg-type]
        ({"structured_outputs": StructuredOutputs(grammar="\ud800")}, "structured_outputs.grammar"),
    ],
)
def test_bad_arguments_are_refused_before_the_call(options: dict, param: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        AsyncClient("127.0.0.1:1").stream("hello", **options)
    assert refused.value.param == param
    assert param.rpartition(".")[2] in refused.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "half a surrogate \ud800"}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt_ids": [2**32]}, "prompt_ids"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user", "content": "hello"}}, "messages"),
    ],
)
def test_bad_input_is_refused_before_the_call(options: dict, param: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        AsyncClient("127.0.0.1:1").stream(**options)
    assert refused.value.param == param


def test_an_llms_input_is_one_or_a_list_of_such() -> None:
    message = {"role": "user", "content": "hello"}
    text, ids, chat = ("one", {}), (None, {"prompt_ids": [1, 2]}), (None, {"messages": [message]})
    assert (
        read_prompts("one") == [text] and read_prompts([1, 2]) == [ids] and read_prompts(["one", [1, 2]]) == [text, ids]
    )
    assert read_chats([message]) == [chat] and read_chats([[message], [message]]) == [chat, chat]
    assert read_chats([]) == read_prompts([]) == []
    for wrong in ("hello", message):
        assert read_chats(wrong) == [(None, {"messages": wrong})]  # type: ignore[arg-type]
    for wrong in (5, b"hello", {"a": 1}):
        with pytest.raises(errors.InvalidRequest, match=r"prompts is .*, must be a text"):
            read_prompts(wrong)  # type: ignore[arg-type]
    for wrong in (1.5, None, b"hello"):
        with pytest.raises(errors.InvalidRequest, match=r"prompts holds .*, must hold texts or lists"):
            read_prompts([wrong])  # type: ignore[list-item]


def test_an_llms_sampling_is_one_or_one_of_each_prompt() -> None:
    two = [{"n": 2}, {}]
    assert read_sampling(None, 2) == [{}, {}] and read_sampling(two[0], 2) == [two[0]] * 2
    assert read_sampling(two, 2) == two
    for wrong in (5, "ab", b"ab", [None, None], [{}, 5]):
        with pytest.raises(errors.InvalidRequest, match=r"sampling is .*, must be a dict"):
            read_sampling(wrong, 2)
    with pytest.raises(errors.InvalidRequest, match="sampling has 2 entries for 3 prompts"):
        read_sampling(two, 3)
    assert max_choices([("a", {"n": 2}), ("b", {})]) == 2
    odd: list[Any] = [("a", {"n": n}) for n in (None, "x", 0, -1, 1.5)]
    assert max_choices(odd) == max_choices([]) == 1, "they are refused where they are sent"


def test_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unknown parameter 'max_token'; known: .*max_tokens"):
        AsyncClient("127.0.0.1:1").stream("hello", max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AsyncClient("ftp://127.0.0.1:8001"),
        lambda: AsyncClient("http:///v1"),
        lambda: AsyncClient("127.0.0.1:99999"),
        lambda: AsyncClient(timeout_s=0),
        lambda: AsyncClient(retries=-1),
        lambda: RetryPolicy(backoff_s=math.nan),
    ],
)
def test_impossible_settings_are_refused(make: object) -> None:
    with pytest.raises(errors.ConfigError):
        make()  # type: ignore[operator]


# ---- leaving early


async def test_leaving_the_block_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        async with client.stream("hello") as stream:
            async for round_ in stream:
                assert round_.text_delta == " the quick red"
                assert not gateway.cancelled.is_set()
                break
        assert await asyncio.to_thread(eventually, gateway.cancelled)
        assert [round_ async for round_ in stream] == []
        await stream.aclose()


async def test_cancelling_the_task_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        task = asyncio.create_task(client.generate("hello"))
        assert await asyncio.to_thread(eventually, gateway.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_a_dropped_stream_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        stream = client.stream("hello")
        await anext(stream)
        del stream
        gc.collect()
        assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_closing_the_client_ends_its_calls_with_an_error(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    client = AsyncClient(gateway.address)
    task = asyncio.create_task(client.generate("hello"))
    assert await asyncio.to_thread(eventually, gateway.asked)
    await client.aclose()
    await client.aclose()
    with pytest.raises(errors.OutriderError, match="closed while this call was in progress"):
        await task
    with pytest.raises(errors.OutriderError, match="client is closed"):
        await client.models()


# ---- errors, deadlines, retries


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        (errors.InvalidRequest("top_p is 2", param="top_p"), errors.InvalidRequest),
        (errors.ModelNotFound("no model 'x'", param="model"), errors.ModelNotFound),
        (errors.RequestTooLarge("too big"), errors.InvalidRequest),
        (errors.Overloaded("queue is full", retry_after_s=1.5), errors.Overloaded),
        (errors.Unavailable("target restarts"), errors.Unavailable),
        (errors.WorkerLost("stream ended"), errors.Unavailable),
        (errors.DeadlineExceeded("no round in 30 s"), errors.DeadlineExceeded),
        (errors.WorkerFault("bug"), errors.OutriderError),
        (errors.Unauthenticated("no such key"), errors.Unauthenticated),
        (errors.Forbidden("not for this key"), errors.Forbidden),
        (errors.RateLimited("this key is over its limit", retry_after_s=40.0), errors.RateLimited),
    ],
)
async def test_the_error_tree_crosses_the_wire(
    gateway: ScriptedGateway, sent: errors.OutriderError, raised: type[errors.OutriderError]
) -> None:
    gateway.scripts.append(failing(sent))
    async with AsyncClient(gateway.address, retries=0) as client:
        with pytest.raises(raised) as caught:
            await client.generate("hello")
    assert type(caught.value) is raised
    assert caught.value.message == sent.message
    assert caught.value.param == sent.param
    assert caught.value.retry_after_s == sent.retry_after_s


async def test_an_absent_server_is_named_with_the_remedy() -> None:
    async with AsyncClient("127.0.0.1:1", retries=0) as client:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1 .*outrider up") as caught:
            await client.generate("hello")
    assert caught.value.__cause__ is None


async def test_another_server_is_told_apart() -> None:
    server = ServerThread()
    address = server.start(lambda _: [], "127.0.0.1", 0, 1 << 20)
    try:
        async with AsyncClient(address) as client:
            with pytest.raises(errors.OutriderError, match=r"does not offer outrider\.v1\.GenerationService"):
                await client.models()
    finally:
        server.stop(0)


async def test_a_message_over_the_limit_is_not_retried_as_overload(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.RequestTooLarge, match="larger than max"):
            await client.generate("x" * (1 << 21))
    assert gateway.requests == []


async def test_the_deadline_ends_the_call_on_both_sides(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"after 0\.3 s"):
            await client.generate("hello", timeout_s=0.3)
        assert 0.25 < time.monotonic() - started < 3
    assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_the_clients_deadline_holds_unless_the_call_has_its_own(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging(0))
    async with AsyncClient(gateway.address, timeout_s=0.2) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("hello")
        assert (await client.generate("hello", timeout_s=None)).text == TEXT


@pytest.mark.parametrize("error", [errors.Unavailable("restarts"), errors.Overloaded("full")])
async def test_retries_before_the_first_message(gateway: ScriptedGateway, error: errors.OutriderError) -> None:
    gateway.scripts.extend([failing(error), failing(error)])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        assert (await client.generate("hello")).text == TEXT
    assert len(gateway.requests) == 3


async def test_retries_are_counted_out(gateway: ScriptedGateway) -> None:
    gateway.scripts.extend([failing(errors.Unavailable(f"failure {i}")) for i in range(9)])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.Unavailable, match="failure 2"):
            await client.generate("hello")
    assert len(gateway.requests) == 3


@pytest.mark.parametrize("error", [errors.InvalidRequest("no"), errors.WorkerFault("bug"), errors.DeadlineExceeded("")])
async def test_what_cannot_be_helped_is_not_retried(gateway: ScriptedGateway, error: errors.OutriderError) -> None:
    gateway.scripts.append(failing(error))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.OutriderError):
            await client.generate("hello")
    assert len(gateway.requests) == 1


async def test_no_retry_after_the_first_message(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Unavailable("target lost"), num_rounds=1))
    seen = []
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.Unavailable, match="target lost"):
            async for round_ in client.stream("hello"):
                seen.append(round_.text_delta)
    assert seen == [" the quick red"]
    assert len(gateway.requests) == 1


async def test_retry_after_is_respected(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Overloaded("full", retry_after_s=0.4)))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        started = time.monotonic()
        await client.generate("hello")
        assert time.monotonic() - started >= 0.4
    assert len(gateway.requests) == 2


async def test_a_wait_past_the_deadline_is_not_begun(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Overloaded("full", retry_after_s=20)))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        started = time.monotonic()
        with pytest.raises(errors.Overloaded) as caught:
            await client.generate("hello", timeout_s=5)
        assert time.monotonic() - started < 3
    assert caught.value.retry_after_s == 20
    assert len(gateway.requests) == 1


async def test_models_is_retried(gateway: ScriptedGateway) -> None:
    gateway.model_errors.extend([errors.Unavailable("starting"), errors.Unavailable("starting")])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        assert len(await client.models()) == 3
    assert gateway.num_model_calls == 3


@given(attempt=st.integers(0, 5000), asked=st.one_of(st.none(), st.floats(0, 40)), retries=st.integers(0, 6000))
def test_waits_are_bounded(attempt: int, asked: float | None, retries: int) -> None:
    policy = RetryPolicy(retries, backoff_s=0.1, max_backoff_s=2.0, max_wait_s=30.0)
    delay_s = policy.delay_s(errors.Overloaded("full", retry_after_s=asked), attempt)
    if attempt >= retries or (asked or 0) > 30:
        assert delay_s is None
    else:
        assert delay_s is not None
        assert (asked or 0) <= delay_s <= (asked or 0) + min(2.0, 0.1 * 2.0 ** min(attempt, 30))


# ---- the transport seam


class FakeTransport:
    """Answers from a list; an exception in it is raised. Remembers deadlines and its end."""

    def __init__(self, *attempts: list[pb.GenerateResponse | Exception]) -> None:
        self.attempts = list(attempts)
        self.timeouts: list[float | None] = []
        self.num_closed_calls = 0
        self.num_closes = 0

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        self.timeouts.append(timeout_s)
        try:
            for item in self.attempts.pop(0):
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_closed_calls += 1

    async def get_models(self, request: pb.GetModelsRequest, timeout_s: float | None) -> pb.GetModelsResponse:
        self.timeouts.append(timeout_s)
        return pb.GetModelsResponse()

    async def close(self) -> None:
        self.num_closes += 1


async def test_an_injected_transport_replaces_the_network() -> None:
    transport = FakeTransport(list(rounds()))
    async with AsyncClient("not an address", transport=transport, timeout_s=None) as client:
        assert (await client.generate("hello")).text == TEXT
        assert await client.models() == ()
    assert transport.timeouts == [None, None]
    assert transport.num_closes == 1


async def test_attempts_share_one_deadline() -> None:
    lost = errors.Unavailable("lost", retry_after_s=0.05)
    transport = FakeTransport([lost], [lost], list(rounds()))
    async with AsyncClient(transport=transport, timeout_s=10) as client:
        await client.generate("hello")
    first, second, third = (timeout_s for timeout_s in transport.timeouts if timeout_s is not None)
    assert 10 >= first > second + 0.04
    assert second > third + 0.04
    assert transport.num_closed_calls == 3


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "without an answer"),
        (rounds()[:2], "before choice 0 had finished"),
        ([pb.GenerateResponse(tokens=[pb.GeneratedToken(id=1, kind=99)])], "unknown token kind 99"),  # type: ignore[arg-type]
        ([pb.GenerateResponse(finish_reason=99)], "unknown finish reason 99"),  # type: ignore[arg-type]
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error(
    messages: list[pb.GenerateResponse], complaint: str
) -> None:
    with pytest.raises(errors.OutriderError, match=complaint):
        await AsyncClient(transport=FakeTransport(list(messages))).generate("hello")


def test_an_async_client_belongs_to_one_loop(gateway: ScriptedGateway) -> None:
    transport = GrpcTransport(gateway.address)
    client = AsyncClient(transport=transport)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.models())
        with pytest.raises(errors.OutriderError, match="one per loop"):
            second.run(client.models())
        first.run(client.aclose())


# ---- the blocking face


def test_sync_client_does_all_the_async_one_does(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        assert client.generate("hello").text == TEXT
        assert [model.id for model in client.models()] == ["pair", "guessed", "alone"]
        with client.stream("hello") as stream:
            assert "".join(round_.text_delta for round_ in stream) == TEXT
        with pytest.raises(errors.InvalidRequest):
            client.generate("hello", n=0)


def test_sync_client_is_shared_by_threads(gateway: ScriptedGateway) -> None:
    def work(index: int) -> Completion:
        return client.generate(f"prompt {index}", n=2)

    with Client(gateway.address) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(32)))
    assert {answer.choices[1].text for answer in answers} == {TEXT}
    assert {request.prompt for request in gateway.requests} == {f"prompt {index}" for index in range(32)}


def test_sync_stream_left_early_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    with Client(gateway.address) as client:
        with client.stream("hello") as stream:
            assert next(stream).num_drafted == 3
        assert eventually(gateway.cancelled)
        assert list(stream) == []


def test_sync_client_closes_twice_and_says_so_afterwards(gateway: ScriptedGateway) -> None:
    client = Client(gateway.address)
    stream = client.stream("hello")
    next(stream)
    client.close()
    client.close()
    stream.close()
    with pytest.raises(errors.OutriderError, match="client is closed"):
        client.generate("hello")
    with pytest.raises(errors.OutriderError, match="client is closed"):
        next(stream)


def test_closing_from_another_thread_ends_a_waiting_call(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    client = Client(gateway.address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hello")
        assert eventually(gateway.asked)
        client.close()
        with pytest.raises(errors.OutriderError, match="closed while this call was in progress"):
            waiting.result(5)
    assert eventually(gateway.cancelled)


def test_ctrl_c_in_a_waiting_call_cancels_it_and_leaves_the_client_usable(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        assert eventually(gateway.asked)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with Client(gateway.address) as client, ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.generate("hello")
        interrupted.result(5)
        assert eventually(gateway.cancelled)
        assert client.generate("hello").text == TEXT


def test_a_dropped_sync_client_ends_its_thread(gateway: ScriptedGateway) -> None:
    client = Client(gateway.address)
    client.models()
    thread, gone = client._thread._thread, weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_an_unclosed_sync_client_leaves_quietly_at_exit(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    script = (
        "from outrider.client import Client\n"
        f"client = Client({gateway.address!r})\n"
        "stream = client.stream('hello')\n"
        "print(next(stream).text_delta)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " the quick red\n", "")
    assert eventually(gateway.cancelled)


def test_a_process_forked_while_a_client_is_connected_is_told_so_at_its_first_call(gateway: ScriptedGateway) -> None:
    script = (
        "import asyncio, os\n"
        "from outrider.client import AsyncClient, Client, OutriderError\n"
        "def forked(when, ask):\n"
        "    if not (child := os.fork()):\n"
        "        try:\n"
        "            ask()\n"
        "            said = 'answered'\n"
        "        except OutriderError as error:\n"
        "            said = error.message.partition(',')[0]\n"
        "        print(when, said, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "def new():\n"
        f"    with Client({gateway.address!r}, timeout_s=20) as client:\n"
        "        client.models()\n"
        "async def asynchronous():\n"
        f"    client = AsyncClient({gateway.address!r})\n"
        "    await client.models()\n"
        "    return client\n"
        f"client = Client({gateway.address!r})\n"
        "forked('unused:', new)\n"
        "client.models()\n"
        "forked('connected:', new)\n"
        "forked('old:', client.models)\n"
        "forked('asynchronous:', lambda: asyncio.run(asynchronous()))\n"
        "client.close()\n"
        "forked('closed:', new)\n"
        "left = asyncio.run(asynchronous())\n"
        "forked('its loop has ended:', new)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    refused = "this process was forked from one in which a client was connected"
    said = {
        "unused": "answered",
        "connected": refused,
        "old": refused,
        "asynchronous": refused,
        "closed": "answered",
        "its loop has ended": refused,
    }
    assert dict(line.split(": ") for line in done.stdout.splitlines()) == said, done.stderr


def test_a_client_pings_no_more_often_than_grpcs_servers_allow_and_only_during_calls(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default they end a connection with more than a ping in 300 s without data, or with any without a call."""
    options: dict[str, int] = {}
    make = grpc.aio.insecure_channel

    def noted(address: str, options_of_channel: list[tuple[str, int]]) -> Any:
        options.update(options_of_channel)
        return make(address, options=options_of_channel)

    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda address, options: noted(address, options))
    with Client(gateway.address) as client:
        client.models()
    assert options["grpc.keepalive_time_ms"] > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    with Client(gateway.address, ping_interval_s=2.5) as client:
        client.models()
    assert options["grpc.keepalive_time_ms"] == 2500
    with pytest.raises(errors.ConfigError, match=r"ping_interval_s is 0\.5, must be from 1 to 86400"):
        Client(gateway.address, ping_interval_s=0.5)


def test_a_client_made_before_a_fork_is_refused_behind_it_and_its_streams_are_left_alone() -> None:
    script = (
        "import os\n"
        "from outrider.client import Client, OutriderError\n"
        "client = Client('127.0.0.1:1')\n"
        "stream = client.stream('hello')\n"
        "if (child := os.fork()):\n"
        "    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n"
        "    client.generate('hello')\n"
        "except OutriderError as error:\n"
        "    print(error.message)\n"
        "with stream:\n"
        "    pass\n"
        "client.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = "this client was made before this process was forked; make a new one here\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


# ---- the package


def test_exports_are_sorted_and_there() -> None:
    names = outrider.client.__all__
    assert names == sorted(names)
    assert all(hasattr(outrider.client, name) for name in names)
    public = {name for name, value in vars(outrider.client).items() if isinstance(value, type)}
    assert public == set(names)


def test_importing_the_sdk_loads_no_server_and_no_torch() -> None:
    heavy = ("torch", "transformers", "ray", "fastapi", "uvicorn", "prometheus_client", "gateway", "outrider.engine")
    script = f"import sys, outrider.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documents_examples_run(gateway: ScriptedGateway) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    of_a_gateway = [block for block in blocks if "LLM(" not in block]  # the other one: tests/e2e/test_llm.py
    assert len(of_a_gateway) >= 4
    for block in of_a_gateway:
        exec(compile(block.replace("127.0.0.1:8001", gateway.address), "docs/sdk.md", "exec"), {})
    assert len(gateway.requests) == 2


def test_an_answer_without_drafts_says_why_and_what_to_try() -> None:
    usage = Usage(3, 8, 2, 10, 5, 0, 0, 7)
    assert usage.describe() == "acceptance rate 0.50 (5/10), mean accepted length 3.50"
    plain = replace(usage, num_rounds=0, num_draft_tokens=0, num_accepted_tokens=0, num_plain_steps=8)
    assert plain.describe() == "nothing was drafted"
    for reason in PLAIN_REASONS:
        assert replace(plain, plain_reason=reason).describe() == f"nothing was drafted: {PLAIN_ADVICE[reason]}"
