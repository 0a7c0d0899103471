"""vLLM's series and its `metrics.speculative_decoding` over real requests: each other's counts, and those of usage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.samples import total
from tests.stack import Process, Stack, gateway_beside, read_metrics

CODE = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> Iterator[Process]:
    """One of its own, so that its counters hold this module's requests only."""
    with gateway_beside(stack) as started:
        yield started


def post(gateway: Process, **fields: Any) -> dict[str, Any]:
    body = {"prompt": CODE, "max_tokens": 32, "temperature": 0, **fields}
    answer = httpx.post(f"http://{gateway.ready['http']}/v1/completions", json=body, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def stream(gateway: Process, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 32, "temperature": 0, "stream": True, **fields}
    answer = httpx.post(f"http://{gateway.ready['http']}/v1/{path}", json=body, timeout=60).raise_for_status()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def acceptance(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
    return found


def test_the_series_are_the_sum_of_the_answers_and_agree_with_ours(gateway: Process) -> None:
    def samples() -> dict[str, float]:
        return read_metrics(f"http://{gateway.ready['http']}/metrics")

    before = samples()
    answers = [post(gateway, seed=seed, temperature=0.8, max_tokens=20) for seed in range(4)]
    answers.append(post(gateway, stop=["self"]))
    url, body = f"http://{gateway.ready['http']}/v1/completions", {"prompt": CODE, "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", url, json={**body, "ignore_eos": True}, timeout=60) as answer:
        assert answer.is_success
        running = samples()
        while not total(running, "vllm:kv_cache_usage_perc"):  # the target is asked for it twice a second
            running = samples()
        assert total(running, "vllm:num_requests_running") == 1
        assert total(running, "vllm:kv_cache_usage_perc") < 1
    after = samples()
    while not grown(before, after, "vllm:request_success_total", finished_reason="abort"):
        after = samples()
    told = [acceptance(answer) for answer in answers]
    usages = [answer["usage"] for answer in answers]
    for name, own, of_answers in (
        ("spec_decode_num_drafts_total", "spec_rounds_total", "num_spec_steps"),
        ("spec_decode_num_draft_tokens_total", "spec_draft_tokens_total", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens_total", "spec_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        count = grown(before, after, f"vllm:{name}")
        assert count == grown(before, after, own)
        assert count >= sum(each[of_answers] for each in told) > 0, "those of who left, too"
    assert grown(before, after, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == grown(
        before, after, "vllm:spec_decode_num_accepted_tokens_total"
    )
    reasons = Counter(answer["choices"][0]["finish_reason"] for answer in answers)
    assert reasons["length"] >= 4 or reasons["stop"] >= 1
    found = {each: grown(before, after, "vllm:request_success_total", finished_reason=each) for each in reasons}
    assert found == reasons
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_decode_time_seconds"):
        assert grown(before, after, f"vllm:{name}_count") == len(answers)
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert grown(before, after, "vllm:request_generation_tokens_sum") == tokens
    assert (
        grown(before, after, "vllm:generation_tokens_total")
        == grown(before, after, "spec_emitted_tokens_total")
        >= tokens
    )
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert grown(before, after, "vllm:request_prompt_tokens_sum") == prompts
    assert grown(before, after, "vllm:prompt_tokens_total") == prompts * 6 / 5, "who left had the same prompt"
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown(before, after, "vllm:prefix_cache_hits_total") >= cached > 0
    whole, parts = (
        sum(grown(before, after, f"vllm:{name}_sum") for name in names)
        for names in (
            ("e2e_request_latency_seconds",),
            ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        )
    )
    assert parts == pytest.approx(whole)
    assert total(after, "vllm:num_requests_running") == 0


def grown(before: dict[str, float], after: dict[str, float], name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)
