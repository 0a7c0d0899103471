"""API keys at both front ends: who gets in, what each limit refuses, and that who waits as told gets in again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.admission.admission import Admission
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.service.front_door import admission_of, grpc_of, http_of
from tests.service.scripted_generator import ScriptedGenerator

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
KEY = new_key()

MakeAdmission = Callable[..., Admission]


@pytest.fixture
def keyed(generator: ScriptedGenerator, tmp_path: Path) -> MakeAdmission:
    def make(*, settings: dict[str, Any] | None = None, **fields: Any) -> Admission:
        """`fields` of the key KEY, named "me"; there is a second one, "you", without limits."""
        mine = ApiKey(name="me", sha256=digest_of(KEY), **fields)
        write_keys(tmp_path / "keys.yaml", (mine, ApiKey(name="you", sha256=digest_of("or-you"))))
        return admission_of(generator, api_keys=str(tmp_path / "keys.yaml"), **(settings or {}))

    return make


def caller_of(admission: Admission, key: str | None = KEY) -> httpx.AsyncClient:
    return http_of(admission, headers={} if key is None else {"authorization": f"Bearer {key}"})


async def generate(stub: Any, key: str | None = KEY, **fields: Any) -> int:
    """Messages that came."""
    params = common_pb2.SamplingParams(max_tokens=fields.pop("max_tokens", 50))
    request = gateway_pb2.GenerateRequest(prompt="x", params=params, **fields)
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    return len([message async for message in stub.Generate(request, metadata=metadata)])


# --- who gets in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "told"), [(None, "an API key is needed"), ("or-wrong", "not known"), ("", "is needed")]
)
async def test_http_without_a_valid_key_is_401(
    keyed: MakeAdmission, generator: ScriptedGenerator, key: str | None, told: str
) -> None:
    async with caller_of(keyed(), key) as http:
        for answer in (
            await http.post(COMPLETIONS, json={"prompt": "x"}),
            await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}),
            await http.post(COMPLETIONS, json={"prompt": "x", "stream": True}),
            await http.post(COMPLETIONS, content=b"{"),
            await http.get(MODELS),
            await http.get("/v1"),
            await http.get("/v1/embeddings"),
            await http.delete("/v1/files/x"),
        ):
            assert answer.status_code == 401, answer.text
            assert answer.headers["www-authenticate"] == "Bearer"
            assert told in answer.json()["error"]["message"]
            assert (answer.json()["error"]["code"]) == "invalid_api_key"
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await http.get(path)).status_code == 200
    assert generator.requests == []


async def test_a_body_is_not_read_before_the_key_is_known(keyed: MakeAdmission) -> None:
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    async with caller_of(keyed(), "or-wrong") as http:
        assert (await http.post(COMPLETIONS, content=endless())).status_code == 401


async def test_grpc_without_a_valid_key_is_unauthenticated_and_health_stays_open(
    keyed: MakeAdmission, generator: ScriptedGenerator
) -> None:
    async with grpc_of(keyed()) as (stub, address):
        for key in (None, "or-wrong"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(stub, key)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetModels(gateway_pb2.GetModelsRequest())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await generate(stub)
        metadata = (("authorization", f"Bearer {KEY}"),)
        assert (await stub.GetModels(gateway_pb2.GetModelsRequest(), metadata=metadata)).models
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    assert {request.key_name for request in generator.requests} == {"me"}


# --- limits ------------------------------------------------------------------------------------------------------


async def test_requests_over_the_rate_are_429_and_the_retry_passes(keyed: MakeAdmission) -> None:
    admission = keyed(requests_per_minute=60)
    async with caller_of(admission) as http, caller_of(admission, "or-you") as other:
        for _ in range(60):
            assert (await http.post(COMPLETIONS, json={})).status_code == 400  # refused ones count too
        over = await http.post(COMPLETIONS, json={"prompt": "x"})
        assert over.status_code == 429
        error = over.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "rate_limit_exceeded",
            "rate_limit_error",
            "requests_per_minute",
        )
        assert (await other.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
        assert (await http.get(MODELS)).status_code == 200
        await asyncio.sleep(float(over.headers["retry-after"]))
        assert (await http.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200


async def test_a_client_that_leaves_pays_for_what_was_made(keyed: MakeAdmission, generator: ScriptedGenerator) -> None:
    generator.pause_at = 2
    admission = keyed(tokens_per_minute=1000)
    async with caller_of(admission) as http:
        call = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 500}))
        await asyncio.wait_for(generator.paused.wait(), 10)
        call.cancel()
        await asyncio.wait_for(generator.all_left.wait(), 10)
        await asyncio.gather(call, return_exceptions=True)
    labels = {"key": "me", "kind": "completion"}
    assert admission.registry.get_sample_value("outrider_key_tokens_total", labels) == 6
    assert admission.registry.get_sample_value("outrider_key_tokens_total", {"key": "me", "kind": "prompt"}) == 2


async def test_answers_at_once_are_counted_over_both_front_ends(
    keyed: MakeAdmission, generator: ScriptedGenerator
) -> None:
    generator.pause_at = 1
    admission = keyed(max_concurrent=3)
    async with caller_of(admission) as http, caller_of(admission, "or-you") as other, grpc_of(admission) as (stub, _):
        too_many = await http.post(COMPLETIONS, json={"prompt": ["x", "y"], "n": 2})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        held = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "n": 2}))
        await asyncio.wait_for(generator.paused.wait(), 10)
        over = await http.post(COMPLETIONS, json={"prompt": "x", "n": 2})
        assert (over.status_code, over.json()["error"]["param"]) == (429, "max_concurrent")
        assert int(over.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stub, num_choices=2)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        generator.pause_at = None
        assert (await http.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200, "one is left"
        assert (await other.post(COMPLETIONS, json={"prompt": "x", "n": 9})).status_code == 200
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        assert (await http.post(COMPLETIONS, json={"prompt": "x", "n": 2})).status_code == 200
        assert await generate(stub, num_choices=3)


# --- tenants and names -------------------------------------------------------------------------------------------


async def test_in_user_scope_keys_do_not_meet_and_users_divide_their_keys_scope(
    keyed: MakeAdmission, generator: ScriptedGenerator
) -> None:
    admission = keyed(settings={"prefix_cache_scope": "user"})
    async with caller_of(admission) as mine, caller_of(admission, "or-you") as yours:
        for http, body in (
            (mine, {}),
            (mine, {}),
            (mine, {"user": "a"}),
            (yours, {"user": "a"}),
            (yours, {}),
            (yours, {"user": "a", "cache_salt": "s"}),
        ):
            assert (await http.post(COMPLETIONS, json={"prompt": "x", **body})).status_code == 200
    salts = [request.cache_salt for request in generator.requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 5 and b"" not in salts


async def test_a_key_is_never_shown(
    keyed: MakeAdmission, generator: ScriptedGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    admission = keyed(requests_per_minute=1)
    texts = []
    async with caller_of(admission) as http:
        for _ in range(2):
            texts.append((await http.post(COMPLETIONS, json={"prompt": "x"})).text)
        generator.fail_at = (0, RuntimeError(KEY))
        metrics = (await http.get("/metrics")).text
    assert 'outrider_key_requests_total{key="me"} 2.0' in metrics
    assert not any(part in text for text in (*texts, metrics, caplog.text) for part in (KEY, digest_of(KEY)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_work_of_the_tokenizer_counts_as_an_answer(keyed: MakeAdmission, path: str, body: Any) -> None:
    admission = keyed(max_concurrent=1)
    caller = admission.incoming(f"Bearer {KEY}").caller
    async with caller_of(admission) as http:
        with caller.count_choices(1, "n"):
            assert (await http.post(path, json=body)).status_code == 429
        assert (await http.post(path, json=body)).status_code == 200 and caller.num_choices == 0
