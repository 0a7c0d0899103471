"""GenerationService over a real gRPC server, with a scripted generator behind it."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.api import operations
from gateway.api.grpc_api import SERVICE, GenerationServicer
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.errors import Overloaded, WorkerLost
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.transport.serving import start_server
from tests.service.front_door import admission_of, grpc_of
from tests.service.scripted_generator import NUM_DRAFTED, Panic, ScriptedGenerator, demo_tokenizer, logged

TOKENIZER = demo_tokenizer()
MODEL = "models/demo/target"
TEXT = "the quick brown fox"
Status = health_pb2.HealthCheckResponse


async def test_health_follows_readiness_and_watchers_are_told(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "HEALTH_INTERVAL_S", 0.01)
    generator.reason = "no target"
    servicer = GenerationServicer(admission_of(generator))
    server, address, health = await start_server(servicer.add_to, "127.0.0.1", 0, 1 << 24)
    following = asyncio.create_task(operations.follow_readiness(health, generator))
    serving, not_serving = Status(status=Status.SERVING), Status(status=Status.NOT_SERVING)
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            questions = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE)]
            watches = [stub.Watch(question) for question in questions]
            states = [Status(status=Status.UNKNOWN)] * 2
            for reason, state in (("no target", not_serving), (None, serving), ("no target", not_serving)):
                generator.reason = reason
                while states != [state, state]:
                    states = [await watch.read() for watch in watches]
                assert [await stub.Check(question) for question in questions] == [state, state]
            unknown = health_pb2.HealthCheckRequest(service="another")
            assert await stub.Watch(unknown).read() == Status(status=Status.SERVICE_UNKNOWN)
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await stub.Check(unknown)
    finally:
        following.cancel()
        await server.stop(None)


async def collect(call: Any) -> list[gateway_pb2.GenerateResponse]:
    return [message async for message in call]


def asking(**fields: Any) -> gateway_pb2.GenerateRequest:
    fields.setdefault("prompt", "Once")
    params = common_pb2.SamplingParams(**fields.pop("params", {"max_tokens": 50}))
    return gateway_pb2.GenerateRequest(params=params, **fields)


async def test_each_round_is_a_message_with_its_tokens_and_counts(generator: ScriptedGenerator) -> None:
    generator.num_cached = 3
    async with grpc_of(admission_of(generator)) as (stub, _):
        request = asking(has_seed=True, params={"seed": 2**64 - 1, "max_tokens": 50})
        messages = await collect(stub.Generate(request))
    ids = TOKENIZER.encode(TEXT)
    assert [token.id for message in messages for token in message.tokens] == ids
    assert "".join(message.text_delta for message in messages) == TEXT
    assert len(messages) == math.ceil(len(ids) / 3)
    assert len({message.request_id for message in messages}) == 1
    kinds = [token.kind for token in messages[0].tokens]
    assert kinds == [common_pb2.TOKEN_KIND_ACCEPTED] * 2 + [common_pb2.TOKEN_KIND_RECOVERED]
    assert {(message.num_drafted, message.num_accepted) for message in messages} == {(NUM_DRAFTED, 2)}
    timings = messages[0].timings
    parts = (timings.deliver_us, timings.verify_us, timings.overhead_us)
    assert (timings.total_us, parts) == (4000, (1500, 2000, 500))
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].usage
    assert messages[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert (usage.num_completion_tokens, usage.num_rounds, usage.seed) == (len(ids), len(messages), 2**64 - 1)
    assert usage.num_cached_prompt_tokens == 3


async def test_choices_logprobs_and_stops(generator: ScriptedGenerator) -> None:
    generator.numbered = True
    request = asking(
        num_choices=2, stop=[" brown"], params={"max_tokens": 9, "num_logprobs": 2}, bad_words=["fox"], model=MODEL
    )
    async with grpc_of(admission_of(generator)) as (stub, _):
        messages = await collect(stub.Generate(request))
    for choice in (0, 1):
        mine = [message for message in messages if message.choice == choice]
        assert "".join(message.text_delta for message in mine) == "the quick"
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (common_pb2.FINISH_REASON_STOP, " brown")
        for message in mine:
            for token in message.tokens:
                assert token.logprobs.logprob == -0.5
                assert list(token.logprobs.top_ids) == [token.id, token.id + 1]
    assert [each.params.choice for each in generator.requests] == [0, 1]
    assert generator.requests[0].params.seed == generator.requests[1].params.seed
    assert tuple(TOKENIZER.encode(" fox")) in generator.requests[0].params.bad_words


async def test_chats_ids_defaults_and_speculation_arrive(generator: ScriptedGenerator) -> None:
    chat = gateway_pb2.ChatInput(
        messages=[
            gateway_pb2.ChatMessage(role="system", content="a"),
            gateway_pb2.ChatMessage(role="user", content="b"),
        ]
    )
    wishes = gateway_pb2.SpeculationOptions(
        enabled=False,
        num_draft_tokens=common_pb2.NumDraftTokens(number=0),
        draft_logprobs=common_pb2.DRAFT_LOGPROBS_TOPK,
        draft_topk=9,
        acceptance=common_pb2.ACCEPTANCE_RULE_COUPLED,
    )
    async with grpc_of(admission_of(generator)) as (stub, _):
        await collect(stub.Generate(gateway_pb2.GenerateRequest(chat=chat, speculation=wishes)))
        ids = common_pb2.TokenSequence(ids=[5, 6])
        await collect(stub.Generate(gateway_pb2.GenerateRequest(prompt_ids=ids, prediction="the fox")))
    first, second = generator.requests
    assert TOKENIZER.decode(first.prompt_ids) == "a\n\nb"
    assert (first.params.max_tokens, first.params.temperature, first.params.top_p) == (16, 0.0, 1.0)
    assert (first.speculation.enabled, first.speculation.num_draft_tokens, first.speculation.draft_topk) == (
        False,
        0,
        9,
    )
    assert second.prompt_ids == (5, 6)
    assert second.prediction_ids == tuple(TOKENIZER.encode("the fox"))
    assert second.speculation.enabled and second.speculation.num_draft_tokens is None
    rules = [each.params.acceptance for each in generator.requests]
    assert rules == [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION]


CHAT_OF_NOBODY = gateway_pb2.ChatInput(messages=[gateway_pb2.ChatMessage(role="nobody", content="x")])
REFUSED: list[tuple[Callable[[], gateway_pb2.GenerateRequest], str]] = [
    (gateway_pb2.GenerateRequest, "input"),
    (lambda: gateway_pb2.GenerateRequest(prompt_ids=common_pb2.TokenSequence(ids=[4096])), "prompt_ids"),
    (lambda: gateway_pb2.GenerateRequest(chat=gateway_pb2.ChatInput()), "chat"),
    (lambda: gateway_pb2.GenerateRequest(chat=CHAT_OF_NOBODY), "chat.messages[0].role"),
    (lambda: asking(params={"temperature": math.nan}), "temperature"),
    (lambda: asking(params={"logit_bias": {4096: 1.0}}), "logit_bias"),
    (lambda: asking(speculation=gateway_pb2.SpeculationOptions(drafter="model+ngram")), "speculation.drafter"),
    (lambda: asking(speculation=gateway_pb2.SpeculationOptions(tree=common_pb2.TreeShape())), "speculation.tree"),
    (lambda: asking(params={"acceptance": 9}), "acceptance"),
    (lambda: asking(params={"grammar": '{"grammars": []}'}), "params.grammar"),
    (lambda: asking(structured_outputs=gateway_pb2.StructuredOutputs()), "structured_outputs"),
    (
        lambda: asking(structured_outputs=gateway_pb2.StructuredOutputs(json='{"type": "object"}', strict=True)),
        "structured_outputs.json",
    ),
    (
        lambda: asking(structured_outputs=gateway_pb2.StructuredOutputs(regex="a"), params={"ignore_eos": True}),
        "ignore_eos",
    ),
]


@pytest.mark.parametrize(("make", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_cannot_be_is_refused_by_name(
    generator: ScriptedGenerator, make: Callable[[], gateway_pb2.GenerateRequest], param: str
) -> None:
    async with grpc_of(admission_of(generator)) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(make()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["outrider-param"] == param
    assert generator.requests == []


async def test_codes_and_trailers_of_other_errors(generator: ScriptedGenerator, caplog: Any) -> None:
    async def failure(request: gateway_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request))
        return caught.value

    async with grpc_of(admission_of(generator)) as (stub, _):
        assert (await failure(asking(model="gpt-9"))).code() is grpc.StatusCode.NOT_FOUND
        generator.refusal = Overloaded("full", retry_after_s=1.5)
        full = await failure(asking())
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(full.trailing_metadata())["retry-after"] == "1.5"
        generator.refusal, generator.fail_at = None, (1, WorkerLost("the target is gone"))
        lost = await failure(asking())
        assert (lost.code(), lost.details()) == (grpc.StatusCode.UNAVAILABLE, "the target is gone")
        for raised in (RuntimeError("secret prompt"), Panic("secret prompt")):
            generator.fail_at = (1, raised)
            fault = await failure(asking())
            assert fault.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in fault.details() and "secret" not in logged(caplog)
    assert generator.num_open == 0


@pytest.mark.parametrize("pause_at", [0, 1])
async def test_a_client_that_cancels_frees_its_place_at_once(generator: ScriptedGenerator, pause_at: int) -> None:
    generator.pause_at = pause_at
    async with grpc_of(admission_of(generator)) as (stub, _):
        call = stub.Generate(asking())
        reading = asyncio.create_task(collect(call))
        await asyncio.wait_for(generator.paused.wait(), 10)
        assert generator.num_open == 1
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.wait_for(generator.all_left.wait(), 10)
    assert generator.num_open == 0


async def test_a_client_that_reads_nothing_is_left_with_a_clear_status(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.grpc_api.WRITE_TIMEOUT_S", 0.3)
    generator.text = "the quick brown fox jumps over the lazy dog " * 200
    request = asking(num_choices=16, params={"max_tokens": 2000, "num_logprobs": 20})
    async with grpc_of(admission_of(generator)) as (stub, _):
        call = stub.Generate(request)
        await call.read()
        await asyncio.wait_for(generator.all_left.wait(), 20)
        with pytest.raises(grpc.aio.AioRpcError) as left:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # what was under way
                pass
    assert left.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "read nothing" in (left.value.details() or "")


async def test_a_deadline_frees_the_place_and_is_told(generator: ScriptedGenerator) -> None:
    generator.pause_at = 1
    async with grpc_of(admission_of(generator)) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(asking(), timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(generator.all_left.wait(), 10)
    assert generator.num_open == 0
