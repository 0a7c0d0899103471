"""A gateway that dies or hangs in the middle of its streams: the workers free its slots, and another's go on."""

from __future__ import annotations

import asyncio
import signal
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
NOTICED_WITHIN_S = 15.0
"""A hang: nobody says so, the workers' keepalive finds out."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    """Two gateways side by side over one pair that takes 30 ms longer a step."""
    with running_pools(1, 1, 2, target_module="tests.e2e.faults.paced_target", log_folder=tmp_path) as started:
        yield started


def slots(pools: Pools) -> list[int]:
    stack = pools.stack()
    return [info.num_slots_in_use for info in (stack.target_info(), stack.draft_info())]


@pytest.mark.parametrize(
    ("number", "within_s"),
    [
        pytest.param(signal.SIGKILL, FREED_WITHIN_S, id="killed"),
        pytest.param(signal.SIGSTOP, NOTICED_WITHIN_S, id="hung", marks=pytest.mark.slow),
    ],
)
async def test_the_workers_free_its_slots_and_another_gateways_stream_goes_on(
    pools: Pools, number: signal.Signals, within_s: float
) -> None:
    async with AsyncClient(pools.grpc(0), retries=0) as client, AsyncClient(pools.grpc(1)) as other:
        streams = [greedy(client, 1900) for _ in range(NUM_STREAMS)]
        for stream in streams:
            await Seen().read(stream, lambda rounds: len(rounds) == 3)
        seen, going_on, freed = Seen(), greedy(other, 1900), asyncio.Event()
        await seen.read(going_on, lambda rounds: len(rounds) == 3)
        assert slots(pools) == [NUM_STREAMS + 1] * 2
        pools.gateways[0].popen.send_signal(number)
        struck_s = time.monotonic()
        reading = asyncio.create_task(seen.read(going_on, lambda rounds: freed.is_set() and len(rounds) > 20))
        while (held := await asyncio.to_thread(slots, pools)) != [1, 1]:
            assert time.monotonic() - struck_s < within_s, held
            await asyncio.sleep(0.05)
        freed.set()
        await reading
        await going_on.aclose()
        for stream in streams:
            if number is signal.SIGKILL:
                with pytest.raises(OutriderError):
                    await Seen().read(stream, lambda rounds: False)
            await stream.aclose()
    pools.gateways[0].popen.send_signal(signal.SIGCONT)
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))
    for worker in (*pools.targets, *pools.drafts):
        assert worker.log() and "Traceback" not in worker.log(), worker.log()
