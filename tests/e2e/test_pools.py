"""Two targets and two drafts behind one gateway: workers die and hang in mid-stream; no token is lost or repeated."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from outrider.client import AsyncClient, Client
from tests.e2e.streams import PROMPT, Seen, greedy, speculative
from tests.samples import total
from tests.stack import Pools, Process, running_pools

NUM_TOKENS = 240
NOTICED_S = 6.0
"""A worker that hangs is given up within this."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Targets that take 30 ms longer a step, so that streams outlive what is done to them."""
    folder = tmp_path_factory.mktemp("pools")
    invariant = ("--batch-invariant",)
    module = "tests.e2e.faults.paced_target"
    with running_pools(2, 2, target_args=invariant, target_module=module, log_folder=folder) as running:
        yield running


@pytest.fixture
async def client(pools: Pools) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pools.grpc()) as made:
        yield made


@pytest.fixture(scope="module")
def expected(pools: Pools) -> list[int]:
    """What the system says when it is left alone."""
    with Client(pools.grpc()) as client:
        answer = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [token.id for token in answer.choices[0].tokens]


def member_of(pools: Pools, role: str) -> tuple[str, Process]:
    """The one worker of this role that has a request now."""
    samples = pools.metrics()
    (name,) = (
        f"{role}-{index}" for index in range(2) if total(samples, "outrider_member_requests", member=f"{role}-{index}")
    )
    members = pools.targets if role == "target" else pools.drafts
    return name, members[int(name[-1])]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stream_goes_on_at_the_other_target(
    pools: Pools, client: AsyncClient, expected: list[int], number: signal.Signals
) -> None:
    seen = Seen()
    stream = greedy(client, NUM_TOKENS)
    await seen.read(stream, speculative(5))
    name, process = await asyncio.to_thread(member_of, pools, "target")
    process.popen.send_signal(number)
    hit_s = time.monotonic()
    try:
        await seen.read(stream, lambda rounds: False)
        now_at, _ = max(zip(seen.times_s, seen.times_s[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        assert seen.ids == expected
        assert max(b - a for a, b in zip(seen.times_s, seen.times_s[1:], strict=False)) < NOTICED_S
        assert hit_s - 1 < now_at < hit_s + 1, "the longest pause is the fault's"
        assert any(each.num_drafted for each in seen.rounds[-5:]), "drafts go to the other target"
        assert total(pools.metrics(), "outrider_retries_total", reason="lost") >= 1
    finally:
        process.popen.send_signal(signal.SIGCONT)
        if number is signal.SIGKILL:
            await asyncio.to_thread(pools.restart, process)
    await until_connected(pools, name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_drafts_go_on_with_the_other_draft(
    pools: Pools, client: AsyncClient, expected: list[int], number: signal.Signals
) -> None:
    seen = Seen()
    stream = greedy(client, NUM_TOKENS)
    await seen.read(stream, speculative(5))
    name, process = await asyncio.to_thread(member_of, pools, "draft")
    process.popen.send_signal(number)
    hit_s = time.monotonic()
    try:
        await seen.read(stream, speculative(5))
        assert time.monotonic() - hit_s < 4.0, "well before its connection is given up"
        await seen.read(stream, lambda rounds: False)
        assert seen.ids == expected
    finally:
        process.popen.send_signal(signal.SIGCONT)
        if number is signal.SIGKILL:
            await asyncio.to_thread(pools.restart, process)
    await until_connected(pools, name)


async def until_connected(pools: Pools, name: str) -> None:
    give_up = time.monotonic() + 20
    while not total(pools.metrics(), "outrider_worker_connected", member=name):
        assert time.monotonic() < give_up, f"{name} did not come back"
        await asyncio.sleep(0.1)
