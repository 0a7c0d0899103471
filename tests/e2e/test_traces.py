"""Traces and logs of the whole system under load: what is told of a request in three processes, and what never is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from outrider.client import AsyncClient
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.otlp_collector import Collector, Span, collecting
from tests.stack import Process, Stack, running

SECRET = "xyzzyplugh"
"""In all that a user sends."""
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

    def post(self, path: str = "completions", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        prompt = {"messages": [{"role": "user", "content": SECRET}]} if path == "chat/completions" else {}
        body = {
            "model": self.stack.model,
            "max_tokens": 24,
            "temperature": 0,
            **(prompt or {"prompt": SECRET}),
            **fields,
        }
        return httpx.post(f"{self.stack.http}/v1/{path}", json=body, headers=headers, timeout=60)

    def lines(self, process: Process) -> list[dict[str, Any]]:
        """Of its log: every one is an object."""
        text = process.log()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def access_line(self, request_id: str) -> dict[str, Any]:
        """The one line of a request that has ended, or is about to."""
        until = time.monotonic() + 10
        while True:
            lines = [line for line in self.lines(self.stack.gateway) if line["logger"] == "gateway.access"]
            found = [line for line in lines if line["request_id"] == request_id]
            if found:
                assert len(found) == 1
                return found[0]
            assert time.monotonic() < until, f"no line of {request_id}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with collecting() as (collector, endpoint, server):
        args = ("--trace-endpoint", endpoint, "--log-format", "json", "--log-level", "debug")
        folder = tmp_path_factory.mktemp("watched")
        with running(target_args=args, draft_args=args, gateway_args=args, log_folder=folder) as stack:
            yield Watched(stack, collector, lambda: server.stop(None).wait())


def of_trace(trace_id: str) -> Callable[[list[Span]], list[Span]]:
    return lambda spans: [span for span in spans if span.trace_id == trace_id]


def whole(trace_id: str, num_rounds: int) -> Callable[[list[Span]], bool]:
    """The request and its rounds have come from the gateway, and what the workers did for them."""

    def enough(spans: list[Span]) -> bool:
        names = [span.name for span in spans if span.trace_id == trace_id]
        return "request" in names and names.count("verify") >= num_rounds and names.count("propose") >= 1

    return enough


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_a_request_is_one_trace_through_three_processes(watched: Watched) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "my-request-1"}
    response = watched.post(headers=headers, stop=[SECRET], user=SECRET)
    assert response.headers["x-request-id"] == "my-request-1"
    assert response.json()["id"] == "cmpl-my-request-1"
    usage = response.json()["usage"]
    access = watched.access_line("my-request-1")
    num_rounds = access["rounds"] + access["plain_steps"]
    spans = of_trace(TRACE)(watched.collector.wait(whole(TRACE, num_rounds)))

    (request,) = named(spans, "request")
    assert (request.service, request.parent_id) == ("outrider-gateway", CALLER)
    assert not request.is_error
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request.attributes["outrider.outcome"] == "ok"
    assert request.attributes["outrider.accepted"] == usage["speculation"]["num_accepted_tokens"]

    rounds = {span.span_id: span for span in named(spans, "round")}
    assert len(rounds) == num_rounds
    assert {(span.service, span.parent_id) for span in rounds.values()} == {("outrider-gateway", request.span_id)}
    assert sum(int(span.attributes["outrider.num_tokens"]) for span in rounds.values()) == usage["completion_tokens"]

    verifies, proposes = named(spans, "verify"), named(spans, "propose")
    assert {span.parent_id for span in verifies} == set(rounds)
    assert {span.service for span in verifies} == {"outrider-target"}
    assert {span.parent_id for span in proposes} <= set(rounds)
    assert {span.service for span in proposes} == {"outrider-draft"}
    for phase, parents in (("forward", verifies), ("accept", verifies), ("compute", proposes)):
        assert {span.parent_id for span in named(spans, phase)} <= {span.span_id for span in parents}
        assert named(spans, phase), phase
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id != CALLER:  # on one machine a child begins within its parent, a clock's step aside
            assert by_id[span.parent_id].start_ns - 1_000_000 <= span.start_ns <= by_id[span.parent_id].end_ns
    assert len(by_id) == len(spans)


async def test_so_is_one_over_grpc(watched: Watched) -> None:
    trace_id = "1" * 32
    request = gateway_pb2.GenerateRequest(prompt=SECRET, bad_words=[SECRET], cache_salt=SECRET, user=SECRET)
    async with grpc.aio.insecure_channel(watched.stack.grpc) as channel:
        call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
            request, metadata=(("traceparent", f"00-{trace_id}-{CALLER}-01"), ("x-request-id", "my-request-2"))
        )
        replies = [reply async for reply in call]
    assert {reply.request_id for reply in replies} == {"gen-my-request-2"}
    spans = await asyncio.to_thread(watched.collector.wait, whole(trace_id, len(replies)))
    assert {span.service for span in of_trace(trace_id)(spans)} == {
        "outrider-gateway",
        "outrider-draft",
        "outrider-target",
    }
    access = watched.access_line("my-request-2")
    assert access["trace_id"] == trace_id
    assert access["completion_tokens"] == sum(len(reply.tokens) for reply in replies)


def test_what_the_caller_does_not_sample_has_no_spans(watched: Watched) -> None:
    trace_id, later = "2" * 32, "3" * 32
    assert watched.post(headers={"traceparent": f"00-{trace_id}-{CALLER}-00", "x-request-id": "quiet"}).is_success
    assert watched.post(headers={"traceparent": f"00-{later}-{CALLER}-01"}).is_success
    spans = watched.collector.wait(whole(later, 1))
    assert not of_trace(trace_id)(spans)
    assert watched.access_line("quiet")["trace_id"] == trace_id  # logs can be found all the same


def test_refusals_and_clients_that_leave_are_told_too(watched: Watched) -> None:
    assert watched.post(headers={"x-request-id": "bad"}, temperature=-1).status_code == 400
    assert watched.access_line("bad")["outcome"] == "InvalidRequest"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{watched.stack.http}/v1/completions",
            json={"model": watched.stack.model, "prompt": SECRET, "max_tokens": 1500, "ignore_eos": True},
            headers={"x-request-id": "left"},
            timeout=0.3,
        )
    line = watched.access_line("left")
    assert (line["outcome"], line["level"]) == ("cancelled", "info")
    assert 0 < line["completion_tokens"] < 1500


async def test_a_load_with_errors_leaves_nothing_but_json_and_nothing_of_what_users_sent(watched: Watched) -> None:
    async def spoil(client: httpx.AsyncClient, fields: dict[str, Any], path: str = "completions") -> None:
        body = {"model": watched.stack.model, "prompt": SECRET, "max_tokens": 8, **fields}
        headers = {"authorization": f"Bearer {SECRET}"}
        await client.post(f"{watched.stack.http}/v1/{path}", json=body, headers=headers)

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
    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(spoil(client, fields) for fields in wrong * 4))
        content = [{"role": "user", "content": SECRET}]
        await asyncio.gather(*(spoil(client, {"messages": content}, "chat/completions") for _ in range(4)))
        await client.post(f"{watched.stack.http}/v1/completions", content=f'{{"prompt": "{SECRET}')
    async with AsyncClient(watched.stack.grpc) as sdk:
        await asyncio.gather(*(sdk.generate(f"{SECRET} {i}", max_tokens=8, stop=[SECRET]) for i in range(16)))
    for process in watched.processes:
        lines = watched.lines(process)
        assert lines, process.module
        assert SECRET not in process.log(), process.module
        assert {line["process"] for line in lines} == {process.module.removesuffix("_service")}
    outcomes = [line["outcome"] for line in watched.lines(watched.stack.gateway) if line["logger"] == "gateway.access"]
    assert {"ok", "InvalidRequest", "ModelNotFound"} <= set(outcomes)
    assert not any(SECRET.encode() in message for message in watched.collector.raw)


def test_a_collector_that_is_away_harms_no_request_and_no_end(watched: Watched) -> None:
    before = watched.post(seed=1).json()["choices"][0]["text"]
    watched.stop_collector()
    for _ in range(3):
        started = time.monotonic()
        assert watched.post(seed=1).json()["choices"][0]["text"] == before
        assert time.monotonic() - started < 5
    started = time.monotonic()
    assert watched.stack.gateway.stop() == 0
    assert time.monotonic() - started < 5
    lines = watched.lines(watched.stack.gateway)
    assert any("does not take them" in line["message"] for line in lines if line["level"] == "warning")
    assert SECRET not in watched.stack.gateway.log()
