"""Traces and logs of the whole system under load: what is told of a request, and what never is."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import grpc
import httpx
import pytest

from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.otlp_collector import Collector, Span, collecting
from tests.stack import Process, Stack, running
from tests.waiting import wait_until

SECRET = "xyzzyplugh"
"""In all that a user sends."""
KEY = f"or-{SECRET}"
BEARER = f"Bearer {KEY}"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


class Watched:
    """A stack whose parts trace to `collector` and log as JSON, at debug."""

    def __init__(self, stack: Stack, collector: Collector, stop_collector: Callable[[], None]) -> None:
        self.stack = stack
        self.collector = collector
        self.stop_collector = stop_collector

    @property
    def processes(self) -> list[Process]:
        assert self.stack.draft is not None
        return [self.stack.gateway, self.stack.draft, self.stack.target]

    def url(self, path: str) -> str:
        return f"{self.stack.http}/v1/{path}"

    @cached_property
    def model(self) -> str:
        listed = httpx.get(self.url("models"), headers={"authorization": BEARER}).json()
        return str(listed["data"][0]["id"])

    def post(self, path: str = "completions", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "prompt": SECRET, "max_tokens": 24, "temperature": 0, **fields}
        return httpx.post(self.url(path), json=body, headers={"authorization": BEARER, **(headers or {})}, timeout=60)

    def lines(self, process: Process) -> list[dict[str, Any]]:
        """Of its log: every one is an object."""
        text = process.log()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def access_line(self, request_id: str) -> dict[str, Any]:
        """The one line of a request that has ended, or is about to."""

        def found() -> list[dict[str, Any]]:
            lines = [line for line in self.lines(self.stack.gateway) if line["logger"] == "gateway.access"]
            return [line for line in lines if line["request_id"] == request_id]

        (line,) = wait_until(found, f"no line of {request_id}", 10)
        return line


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with collecting() as (collector, endpoint, server), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms; 5 s otherwise
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")  # 60 s otherwise
        args = ("--trace-endpoint", endpoint, "--log-format", "json", "--log-level", "debug")
        folder = tmp_path_factory.mktemp("watched")
        write_keys(folder / "keys.yaml", (ApiKey(name="alice", sha256=digest_of(KEY)),))
        keys = ("--api-keys", str(folder / "keys.yaml"))
        with running(target_args=args, draft_args=args, gateway_args=(*args, *keys), log_folder=folder) as stack:
            yield Watched(stack, collector, lambda: server.stop(None).wait())


def of_trace(trace_id: str) -> Callable[[list[Span]], list[Span]]:
    return lambda spans: [span for span in spans if span.trace_id == trace_id]


def whole(trace_id: str, num_rounds: int) -> Callable[[list[Span]], bool]:
    """The request and its rounds have come from the gateway, and what the workers did for them."""

    def enough(spans: list[Span]) -> bool:
        found = of_trace(trace_id)(spans)
        return bool(requests(found)) and len(named(found, "verify")) >= num_rounds

    return enough


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def requests(spans: list[Span]) -> list[Span]:
    return [span for span in spans if "gen_ai.operation.name" in span.attributes]


def test_a_request_is_one_trace_through_two_processes(watched: Watched) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "my-request-1"}
    response = watched.post(headers=headers, stop=[SECRET], user=SECRET)
    assert response.headers["x-request-id"] == "my-request-1"
    assert response.json()["id"] == "cmpl-my-request-1"
    usage = response.json()["usage"]
    access = watched.access_line("my-request-1")
    num_rounds = access["rounds"] + access["plain_steps"]
    spans = of_trace(TRACE)(watched.collector.wait(whole(TRACE, num_rounds)))

    assert access["key"] == "alice"
    (request,) = requests(spans)
    assert (request.service, request.parent_id) == ("outrider-gateway", CALLER)
    assert request.name == f"text_completion {watched.model}"
    assert not request.is_error and "error.type" not in request.attributes
    assert request.attributes["gen_ai.provider.name"] == "outrider"
    assert request.attributes["gen_ai.request.model"] == request.attributes["gen_ai.response.model"] == watched.model
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request.attributes["outrider.outcome"] == "ok"
    assert request.attributes["outrider.accepted"] == usage["speculation"]["num_accepted_tokens"]

    rounds = {span.span_id: span for span in named(spans, "round")}
    assert len(rounds) == num_rounds
    assert {(span.service, span.parent_id) for span in rounds.values()} == {("outrider-gateway", request.span_id)}
    assert sum(int(span.attributes["outrider.num_tokens"]) for span in rounds.values()) == usage["completion_tokens"]

    verifies = named(spans, "verify")
    assert {span.parent_id for span in verifies} == set(rounds)
    assert {span.service for span in verifies} == {"outrider-target"}
    for phase in ("forward", "accept"):
        assert {span.parent_id for span in named(spans, phase)} <= {span.span_id for span in verifies}
        assert named(spans, phase), phase
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id != CALLER:  # on one machine a child begins within its parent, a clock's step aside
            parent = by_id[span.parent_id]
            began_ns = request.start_ns if parent.name == "round" else parent.start_ns  # a target runs ahead of it
            assert began_ns - 1_000_000 <= span.start_ns <= parent.end_ns
    assert len(by_id) == len(spans)


async def test_a_load_with_errors_leaves_nothing_but_json_and_nothing_of_what_users_sent(watched: Watched) -> None:
    model = watched.model
    wrong: list[dict[str, Any]] = [
        {"model": SECRET},
        {"stop": [SECRET] * 99},
        {"logit_bias": {SECRET: 1}},
        {"prompt": [1, 2, 10**9]},
        {"max_tokens": SECRET},
        {SECRET: SECRET},
        {"cache_salt": SECRET * 99},
        {"echo": True, "logprobs": 3, "n": 2, "bad_words": [SECRET], "user": SECRET, "stream": True},
    ]
    async with httpx.AsyncClient(timeout=60, headers={"authorization": BEARER}) as client:

        async def post(path: str, body: dict[str, Any], **headers: str) -> None:
            await client.post(watched.url(path), json={"model": model, "max_tokens": 8, **body}, headers=headers)

        chat = {"messages": [{"role": "user", "content": SECRET}]}
        await asyncio.gather(
            *(post("completions", {"prompt": SECRET, **fields}) for fields in wrong * 4),
            *(post("chat/completions", chat) for _ in range(4)),
            *(post("chat/completions", chat, authorization=f"{BEARER}-wrong") for _ in range(4)),
        )
        code = {"prompt": f"class Queue:  # {SECRET}\n    def __init__(self, maxsize=0):\n", "temperature": 0}
        told = await client.post(watched.url("completions"), json={"model": model, "max_tokens": 60, **code})
        await client.post(watched.url("completions"), content=f'{{"prompt": "{SECRET}')
    async with grpc.aio.insecure_channel(watched.stack.grpc) as channel:
        stub = gateway_pb2_grpc.GenerationServiceStub(channel)

        async def generate(authorization: str) -> None:
            request = gateway_pb2.GenerateRequest(prompt=SECRET, stop=[SECRET], user=SECRET)
            async for _ in stub.Generate(request, metadata=(("authorization", authorization),)):
                pass

        await asyncio.gather(*(generate(BEARER) for _ in range(16)))
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await generate(f"{BEARER}-wrong")
    output = max(told.json()["choices"][0]["text"].splitlines(), key=len)
    assert len(output) > 10
    for process in watched.processes:
        lines = watched.lines(process)
        assert lines, process.module
        assert SECRET not in process.log(), process.module
        assert not any(output in str(value) for line in lines for value in line.values()), process.module
        assert {line["process"] for line in lines} == {process.module.removesuffix("_service")}
    links = [line for line in watched.lines(watched.stack.gateway) if line["logger"] == "gateway.workers.links"]
    assert {line["member"] for line in links} == {"target-0", "draft-0"}
    outcomes = [line["outcome"] for line in watched.lines(watched.stack.gateway) if line["logger"] == "gateway.access"]
    assert {"ok", "InvalidRequest", "ModelNotFound", "Unauthenticated"} <= set(outcomes)
    for private in (SECRET.encode(), output.encode()):
        assert not any(private in message for message in (*watched.collector.raw, *watched.collector.metrics.raw))


def test_a_collector_that_is_away_harms_no_request_and_no_end(watched: Watched) -> None:
    before = watched.post(seed=1).json()["choices"][0]["text"]
    watched.stop_collector()
    for _ in range(3):
        started = time.monotonic()
        assert watched.post(seed=1).json()["choices"][0]["text"] == before
        assert time.monotonic() - started < 10
    complaints = wait_until(lambda: complaints_of(watched), "no complaint: spans are sent every few seconds")
    started = time.monotonic()
    assert watched.stack.gateway.stop() == 0
    assert time.monotonic() - started < 10
    assert "UNAVAILABLE" in complaints[0]["message"]
    assert len(complaints_of(watched)) == 1
    assert SECRET not in watched.stack.gateway.log()


def complaints_of(watched: Watched) -> list[dict[str, Any]]:
    """Lines of the exporter's that a person has to read."""
    lines = [line for line in watched.lines(watched.stack.gateway) if line["level"] in ("warning", "error")]
    return [line for line in lines if line["logger"].startswith("opentelemetry.exporter")]
