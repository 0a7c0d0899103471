"""One-way messages that are lost, repeated and overtaken on the way to a target: it goes on from what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from tests.message_relay import Faults, MessageRelay, kind_of
from tests.service.control_client import ControlClient, deliver, delivery, new_ticket, verify
from tests.service.reference_model import ReferenceModel
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
K = 2
NUM_STEPS = 8


async def test_an_old_truncate_never_crops_a_target_that_is_ahead(
    target_worker: Process, reference: ReferenceModel
) -> None:
    """Every Truncate comes steps after its verdict, and some twice: no step feeds again what is in the cache."""
    expected = reference.greedy(PROMPT, NUM_STEPS * (K + 1))
    overtaken = Faults(reorder=1.0, repeat=0.5, late_s=0.1, kinds=frozenset({"truncate"}))
    async with (
        MessageRelay(target_worker.address, overtaken) as relay,
        ControlClient(relay.address, "target") as client,
    ):
        name = 'outrider_worker_truncates_total{reason="rejected",worker="target"}'
        before = (await client.metrics()).get(name, 0.0)

        async def arrived(num: int) -> None:
            async with asyncio.timeout(30):
                while (await client.metrics()).get(name, 0.0) < before + num:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        await client.opened(1, PROMPT, k=K)
        message, committed = verify(1, len(PROMPT), ticket=new_ticket(), num_steps=1), list(PROMPT)
        replies = client.follow(message)
        await client.taken()
        for step in range(NUM_STEPS):
            done = len(committed) - len(PROMPT)
            drafts = [expected[done], (expected[done + 1] + 1) % 320]  # one is kept
            await deliver(client, delivery(client, message.tickets[0].ticket, len(committed), drafts))
            (verdict,) = await replies.verdicts(1)
            assert (verdict.num_drafted, verdict.num_accepted) == (K, 1)
            assert not step or verdict.num_batch_tokens == 1 + K, "it fed again what it had"
            committed += verdict.token_ids
            client.tell(pb.Truncate(slot=1, committed_len=len(committed), reason=pb.TRUNCATE_REASON_REJECTED))
            client.tell(tpb.Extend(slot=1, ticket=message.tickets[0].ticket, until_len=len(committed) + 1))
            if step % 3 == 2:
                await arrived(step)  # a lease that rests is a lease, too
        assert committed == [*PROMPT, *expected[: len(committed) - len(PROMPT)]]
        await arrived(NUM_STEPS)
        assert overtaken.num_reordered == NUM_STEPS and overtaken.num_repeated > 0


async def test_a_target_runs_on_after_extends_that_are_lost_repeated_and_overtaken(
    target_worker: Process, reference: ReferenceModel
) -> None:
    """The next that comes makes up for those that did not; what is older changes nothing."""
    expected = reference.greedy(PROMPT, 24)
    faults = Faults(seed=5, drop=0.3, repeat=0.3, reorder=0.4, kinds=frozenset({"extend"}))

    def fate(item: Any) -> Sequence[float]:
        is_last = kind_of(item) == "extend" and item.extend.until_len == len(PROMPT) + len(expected)
        return (0.0,) if is_last else faults(item)

    async with MessageRelay(target_worker.address, fate) as relay, ControlClient(relay.address, "target") as client:
        await client.opened(1, PROMPT)
        message, ids = verify(1, len(PROMPT), num_steps=1), list[int]()
        replies = client.follow(message)
        for until in range(2, len(expected) + 1):
            client.tell(tpb.Extend(slot=1, ticket=message.tickets[0].ticket, until_len=len(PROMPT) + until))
        for verdict in await replies.verdicts(len(expected)):
            assert verdict.committed_len == len(PROMPT) + len(ids)
            ids += verdict.token_ids
        await client.taken()
        assert ids == expected and replies.empty
    assert min(faults.num_dropped, faults.num_repeated, faults.num_reordered) > 0
