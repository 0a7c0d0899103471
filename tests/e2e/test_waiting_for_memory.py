"""A request that waits for memory inside a worker: the worker counts as healthy, and a deadline ends the request."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from outrider.client import AsyncClient, DeadlineExceeded, RoundStream
from tests.stack import Process, Stack, read_metrics, running
from tests.tiny_models import tiny_llama

ROUND_TIMEOUT_S = 1.0
"""A worker with work that makes no step for so long is dropped."""
DEADLINE_S = 2.5
"""Of the request that waits: much longer, so that a gateway that only looked for answers would have dropped it."""
CONTEXT = 2048
PROMPT = [5 + (7 * i) % 300 for i in range(600)]
OTHER_PROMPT = [5 + (11 * i) % 300 for i in range(1600)]
"""Does not fit beside the first one."""
NUM_TOKENS = 1400
"""Takes several seconds."""
WISHES = {"temperature": 0.0, "ignore_eos": True, "speculation": False}


async def test_waiting_for_memory_is_no_fault_and_ends_with_the_deadline(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=512, num_layers=4, context=CONTEXT, sharpness=3.0)
    options = (f"@gateway.workers.worker_pools.ROUND_TIMEOUT_S={ROUND_TIMEOUT_S}",)
    pool = ("--kv-cache-tokens", str(CONTEXT))
    with running(folder, None, target_args=pool, gateway_args=options, log_folder=tmp_path) as stack:
        address = ("--target", stack.target.address, "--port", "0", "--grpc-port", "0")
        limits = (*options, "--request-timeout-s", str(DEADLINE_S))
        hurried = Process("gateway", [*address, *limits], stderr_path=tmp_path / "hurried.log")
        try:
            await _one_runs_and_one_waits(stack, hurried)
        finally:
            hurried.stop()
        for name in ("gateway.log", "hurried.log"):
            log = (tmp_path / name).read_text()
            assert log.count("connected to the target") == 1 and "dropping" not in log, log


async def _one_runs_and_one_waits(stack: Stack, hurried: Process) -> None:
    async with AsyncClient(stack.grpc) as client, AsyncClient(str(hurried.ready["grpc"]), retries=0) as other:
        async with client.stream(prompt_ids=PROMPT, max_tokens=NUM_TOKENS, **WISHES) as rounds:
            ids = [token.id for token in (await anext(rounds)).tokens]
            running_on = asyncio.create_task(_rest(rounds))
            started_s = time.monotonic()
            waiting = asyncio.create_task(other.generate(prompt_ids=OTHER_PROMPT, max_tokens=100, **WISHES))
            await asyncio.sleep(DEADLINE_S / 2)
            assert await asyncio.to_thread(_num_waiting, stack) == 1
            with pytest.raises(DeadlineExceeded, match="request_timeout_s"):
                await waiting
            assert time.monotonic() - started_s < DEADLINE_S + 5
            assert not running_on.done(), "the other one must have waited all the time"
            await _until_slots(stack, 1)
            ids += await running_on
        again = await client.generate(prompt_ids=PROMPT, max_tokens=100, **WISHES)
    assert ids[:100] == [token.id for token in again.choices[0].tokens]
    await _until_slots(stack, 0)
    assert stack.target_info().num_kv_blocks_in_use == 0


def _num_waiting(stack: Stack) -> float:
    samples = read_metrics(f"http://{stack.target_info().metrics_address}/metrics")
    return samples['outrider_worker_slots_waiting{worker="target"}']


async def _rest(rounds: RoundStream) -> list[int]:
    return [token.id async for each in rounds for token in each.tokens]


async def _until_slots(stack: Stack, count: int) -> None:
    deadline_s = time.monotonic() + 10
    while (info := await asyncio.to_thread(stack.target_info)).num_slots_in_use != count:
        assert time.monotonic() < deadline_s, f"{info.num_slots_in_use} slots are in use, {count} were expected"
        await asyncio.sleep(0.05)
