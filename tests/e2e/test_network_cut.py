"""The network between each two of the three parts, cut and healed: noticed, lived with, and forgotten afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from outrider.client import AsyncClient, Completion, Speculation
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT
from tests.stack import DEMO_TARGET, Process, Stack
from tests.tcp_relay import TcpRelay

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
