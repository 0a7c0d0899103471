"""The network between each two of the three parts, cut and healed: noticed, lived with, and forgotten afterwards."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from outrider.client import AsyncClient, Completion, Speculation
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT, Seen, greedy, read_all, speculative
from tests.stack import DEMO_TARGET, Process, Stack
from tests.tcp_relay import TcpRelay
from tests.waiting import wait_until

NOTICED_WITHIN_S = 15.0
BACK_WITHIN_S = 10.0
"""After the network is whole: the link is made anew, and a draft that was left alone is asked again."""

pytestmark = pytest.mark.timeout(120)


@dataclass
class Network:
    stack: Stack
    client: AsyncClient
    to_target: TcpRelay
    to_draft: TcpRelay
    deliveries: TcpRelay
    """From the draft to the target."""

    def num_connected(self, worker: str) -> float:
        samples = self.stack.metrics().items()
        return sum(
            value
            for name, value in samples
            if name.startswith("outrider_worker_connected{") and f'worker="{worker}"' in name
        )


@pytest.fixture
async def network(stack: Stack) -> AsyncIterator[Network]:
    """A gateway of its own that reaches either worker through a relay, as the draft does the target."""
    assert stack.draft is not None
    async with (
        TcpRelay(stack.target.address) as to_target,
        TcpRelay(stack.draft.address) as to_draft,
        TcpRelay(stack.target.address) as deliveries,
    ):
        workers = ["--target", to_target.address, "--draft", to_draft.address]
        arguments = [*workers, "--target-for-draft", deliveries.address, "--port", "0", "--grpc-port", "0"]
        gateway = Process("gateway", arguments, wait=False)
        try:
            address = str((await asyncio.to_thread(lambda: gateway.ready))["grpc"])
            async with AsyncClient(address) as client:
                own = Stack(stack.target, stack.draft, gateway)
                yield Network(own, client, to_target, to_draft, deliveries)
        finally:
            await asyncio.to_thread(gateway.stop)


async def answer(network: Network, max_tokens: int = 60, speculation: Speculation | bool = True) -> Completion:
    return await network.client.generate(
        PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=speculation
    )


async def noticed(holds: Callable[[], bool]) -> None:
    """Return once it holds, which is asked on another thread. Fail where that takes longer than a cut may."""
    await asyncio.to_thread(wait_until, holds, "the cut is not noticed", NOTICED_WITHIN_S)


async def until_it_drafts(network: Network) -> Completion:
    give_up_s = time.monotonic() + BACK_WITHIN_S
    while not (made := await answer(network)).usage.num_accepted_tokens:
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.1)
    return made


async def judged(*made: Completion) -> None:
    outputs = [(PROMPT, [token.id for token in each.choices[0].tokens]) for each in made]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *outputs)


async def test_draft_and_target_cut_costs_drafts_and_nothing_else(network: Network) -> None:
    before = await until_it_drafts(network)
    with network.deliveries.being_cut():
        during = await answer(network)
        assert network.num_connected("target") == network.num_connected("draft") == 1  # the gateway sees both
    assert during.usage.num_accepted_tokens == 0 and during.usage.num_completion_tokens == 60
    after = await until_it_drafts(network)
    await judged(before, during, after)


@pytest.mark.slow
async def test_gateway_and_draft_cut_is_noticed_and_drafts_return(network: Network) -> None:
    before = await until_it_drafts(network)
    with network.to_draft.being_cut():
        during = [await answer(network)]
        await noticed(lambda: network.num_connected("draft") == 0)
        await noticed(lambda: network.stack.draft_info().num_slots_in_use == 0)
        began_s = time.monotonic()
        during.append(await answer(network))
        assert time.monotonic() - began_s < 3.0  # it is not asked any more
    assert all(each.usage.num_rounds == 0 for each in during[1:])
    after = await until_it_drafts(network)
    await judged(before, *during, after)


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True], ids=["short", "noticed"])
async def test_gateway_and_target_cut_neither_repeats_nor_loses_a_token(network: Network, long: bool) -> None:
    """A short one is only a pause; a long one is noticed by both, and the request goes on from its committed tokens."""
    streams = [greedy(network.client, 600) for _ in range(3)]
    seen = [Seen() for _ in streams]
    await read_all(seen, streams, speculative(3))
    with network.to_target.being_cut():
        if long:
            await noticed(lambda: network.num_connected("target") == 0)
            await noticed(lambda: network.stack.target_info().num_slots_in_use == 0)
        else:
            await asyncio.sleep(1.0)
            assert network.num_connected("target") == 1
    await read_all(seen, streams, lambda rounds: False)
    assert [len(one.ids) for one in seen] == [600] * 3
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *((PROMPT, one.ids) for one in seen))


@pytest.mark.slow
async def test_a_target_that_hangs_is_left_by_its_draft(network: Network) -> None:
    """SIGSTOP: the draft's stream of proposals to it ends, and one to the same target begins when it is back."""
    await until_it_drafts(network)
    num_connections = network.deliveries.num_connections
    target = network.stack.target.popen
    stream, seen = greedy(network.client, 600), Seen()
    await seen.read(stream, speculative(3))
    target.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(NOTICED_WITHIN_S)
        assert network.num_connected("target") == 0
    finally:
        target.send_signal(signal.SIGCONT)
    await seen.read(stream, lambda rounds: False)
    assert len(seen.ids) == 600
    await until_it_drafts(network)
    assert network.deliveries.num_connections > num_connections
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))
