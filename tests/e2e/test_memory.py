"""The KV cache is far too small for what is asked at once: everybody is served, and no token changes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.samples import total
from tests.stack import Stack, read_metrics, running, wait_until_nothing_is_held

NUM_TOKENS = 40
PROMPTS = [[5 + (37 * request + 11 * i) % 4000 for i in range(60 + request % 7)] for request in range(64)]
KV_CACHE_TOKENS = 432
"""About four requests of 60 and 40 tokens."""

pytestmark = pytest.mark.timeout(400)


async def answers(stack: Stack, num_requests: int, concurrency: int) -> list[str]:
    places = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> str:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        async with places:
            reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == NUM_TOKENS
        return str(reply.json()["choices"][0]["text"])

    async with httpx.AsyncClient(base_url=stack.http, timeout=300) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS[:num_requests]))


def worker_metric(stack: Stack, worker: str, name: str) -> float:
    info = stack.target_info() if worker == "target" else stack.draft_info()
    metrics = read_metrics(f"http://{info.metrics_address}/metrics")
    return metrics[f'outrider_worker_{name}{{worker="{worker}"}}']


@pytest.mark.parametrize("num_requests", [20, pytest.param(64, marks=pytest.mark.slow)])
async def test_more_than_memory_holds_is_served_in_turn_with_the_same_tokens(stack: Stack, num_requests: int) -> None:
    expected = await answers(stack, num_requests, concurrency=4)
    memory = ("--kv-cache-tokens", str(KV_CACHE_TOKENS))
    with running(target_args=memory, draft_args=memory) as small:
        assert await answers(small, num_requests, concurrency=num_requests) == expected
        for worker in ("target", "draft"):
            assert worker_metric(small, worker, "preemptions_total") > 0
            assert worker_metric(small, worker, "slots_waiting") == 0
        wait_until_nothing_is_held(small)
        usage = small.metrics()
        assert total(usage, "spec_accepted_tokens_total") > 0
