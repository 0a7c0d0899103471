"""A gateway that is killed under load: its workers free what it held, and say nothing that looks like a fault."""

from __future__ import annotations

import asyncio

from outrider.client import AsyncClient, OutriderError
from tests.stack import Stack, gateway_beside, wait_until_nothing_is_held

NUM_STREAMS = 16


async def test_workers_free_its_slots_without_a_traceback(stack: Stack) -> None:
    with gateway_beside(stack) as gateway:
        started = asyncio.Semaphore(0)

        async def stream(client: AsyncClient) -> None:
            async for _ in client.stream("def add(a, b):", max_tokens=400, temperature=0.0, ignore_eos=True):
                started.release()

        async with AsyncClient(str(gateway.ready["grpc"])) as client:
            streams = [asyncio.create_task(stream(client)) for _ in range(NUM_STREAMS)]
            for _ in range(2 * NUM_STREAMS):
                await started.acquire()
            gateway.popen.kill()
            ended = await asyncio.gather(*streams, return_exceptions=True)
    assert stack.draft is not None
    assert any(isinstance(each, OutriderError) for each in ended), "they were running when it was killed"
    await asyncio.to_thread(wait_until_nothing_is_held, stack)
    for worker in (stack.target, stack.draft):
        assert worker.log() and "Traceback" not in worker.log(), worker.log()
