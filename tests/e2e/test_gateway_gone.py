"""A gateway that dies in the middle of its streams: the workers free its slots, and another's go on."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import AsyncClient, OutriderError
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT, Seen, greedy
from tests.stack import DEMO_TARGET, Pools, running_pools

NUM_STREAMS = 8
FREED_WITHIN_S = 2.0
"""After a death: the kernel says so at once."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    """Two gateways side by side over one pair that takes 30 ms longer a step."""
    with running_pools(1, 1, 2, target_module="tests.e2e.faults.paced_target", log_folder=tmp_path) as started:
        yield started


def slots(pools: Pools) -> list[int]:
    stack = pools.stack()
    return [info.num_slots_in_use for info in (stack.target_info(), stack.draft_info())]


async def test_the_workers_free_its_slots_and_another_gateways_stream_goes_on(pools: Pools) -> None:
    async with AsyncClient(pools.grpc(0), retries=0) as client, AsyncClient(pools.grpc(1)) as other:
        streams = [greedy(client, 1900) for _ in range(NUM_STREAMS)]
        for stream in streams:
            await Seen().read(stream, lambda rounds: len(rounds) == 3)
        seen, going_on, freed = Seen(), greedy(other, 1900), asyncio.Event()
        await seen.read(going_on, lambda rounds: len(rounds) == 3)
        assert slots(pools) == [NUM_STREAMS + 1] * 2
        pools.gateways[0].kill()
        struck_s = time.monotonic()
        reading = asyncio.create_task(seen.read(going_on, lambda rounds: freed.is_set() and len(rounds) > 20))
        while (held := await asyncio.to_thread(slots, pools)) != [1, 1]:
            assert time.monotonic() - struck_s < FREED_WITHIN_S, held
            await asyncio.sleep(0.05)
        freed.set()
        await reading
        await going_on.aclose()
        for stream in streams:
            with pytest.raises(OutriderError):
                await Seen().read(stream, lambda rounds: False)
            await stream.aclose()
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))
    for worker in (*pools.targets, *pools.drafts):
        assert worker.log() and "Traceback" not in worker.log(), worker.log()
