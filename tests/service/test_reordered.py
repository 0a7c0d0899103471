"""One-way messages that are lost, repeated and overtaken on the way to a target: it goes on from what it has."""

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.v1 import target_pb2 as tpb
from tests.message_relay import Faults, MessageRelay, kind_of
from tests.service.control_client import ControlClient, verify
from tests.service.reference_model import ReferenceModel
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)


async def test_a_target_runs_on_after_extends_that_are_lost_repeated_and_overtaken(
    target_worker: Process, reference: ReferenceModel
) -> None:
    """The next that comes makes up for those that did not; what is older changes nothing."""
    expected = reference.greedy(PROMPT, 24)
    faults = Faults(seed=5, drop=0.3, repeat=0.3, reorder=0.4, kinds=frozenset({"extend"}))

    def fate(item: Any) -> Sequence[float]:
        is_last = kind_of(item) == "extend" and item.extend.lease_end_len == len(PROMPT) + len(expected)
        return (0.0,) if is_last else faults(item)

    async with MessageRelay(target_worker.address, fate) as relay, ControlClient(relay.address, "target") as client:
        await client.opened(1, PROMPT)
        message, ids = verify(1, len(PROMPT), num_steps=1), list[int]()
        replies = client.follow(message)
        for until in range(2, len(expected) + 1):
            client.tell(tpb.Extend(slot=1, ticket=message.tickets[0].ticket, lease_end_len=len(PROMPT) + until))
        for verdict in await replies.verdicts(len(expected)):
            assert verdict.committed_len == len(PROMPT) + len(ids)
            ids += verdict.token_ids
        await client.taken()
        assert ids == expected and replies.empty
    assert min(faults.num_dropped, faults.num_repeated, faults.num_reordered) > 0
