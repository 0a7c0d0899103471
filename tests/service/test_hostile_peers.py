"""What a peer can do that is let in and means harm: other streams' slots, others' proposals, all the room there is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.transport.rpc import max_control_bytes
from tests.service.conftest import worker
from tests.service.control_client import (
    ControlClient,
    DeliverClient,
    deliver,
    delivery,
    eventually,
    idle,
    verify,
)
from tests.service.reference_model import ReferenceModel
from tests.service.test_deliver import PROMPT, dropped
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

K = 3


def propose(slot: int, base_len: int, ids: list[int], k: int = K) -> dpb.Propose:
    return dpb.Propose(slot=slot, base_len=base_len, committed_ids=ids, num_draft_tokens=k, ticket=1)


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    with worker("draft_service", target_folder, "--max-slots", "8") as process:
        yield process


# slots of another stream


async def _unknown(stranger: ControlClient, item: Any) -> None:
    reply = await stranger.ask(item)
    assert isinstance(reply, pb.WorkerError) and reply.code == pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, reply


@pytest.mark.parametrize("kind", ["verify", "truncate", "close", "open"])
async def test_a_targets_slot_is_its_streams(
    target: ControlClient, target_worker: Process, reference: ReferenceModel, kind: str
) -> None:
    """A round of the owner's is under way meanwhile: it waits for its proposal."""
    await target.opened(1, PROMPT)
    held = (await target.info()).num_kv_blocks_in_use
    ticket, drafts = secrets.randbits(64), reference.greedy(PROMPT, K)
    round_ = target.start(verify(1, len(PROMPT), k=K, ticket=ticket))
    async with ControlClient(target_worker.address, "target") as stranger:
        match kind:
            case "verify":
                await _unknown(stranger, verify(1, len(PROMPT), [5]))
            case "truncate":
                stranger.tell(pb.Truncate(slot=1, committed_len=1))
            case "close":
                stranger.tell(pb.CloseSlot(slot=1))
            case "open":
                await stranger.opened(1, (3, 4))
                assert (await target.info()).num_slots_in_use == 2
        await _unknown(stranger, verify(2, 0))  # what was sent before it has been done
        assert not round_.done() and (await target.info()).num_kv_blocks_in_use >= held
        await deliver(target, delivery(target, ticket, len(PROMPT), drafts))
        verdict = await asyncio.wait_for(round_, 30)
    assert verdict.num_accepted == K and list(verdict.token_ids) == reference.greedy(PROMPT, K + 1)


@pytest.mark.parametrize("kind", ["propose", "truncate", "close", "open"])
async def test_a_drafts_slot_is_its_streams(
    draft: ControlClient, draft_worker: Process, reference: ReferenceModel, kind: str
) -> None:
    route = {"deliver_to": "127.0.0.1:9", "target_epoch": 1}
    await draft.opened(1, PROMPT, **route)
    assert list((await draft.ask(propose(1, len(PROMPT), []))).draft_ids) == reference.greedy(PROMPT, K)
    async with ControlClient(draft_worker.address, "draft") as stranger:
        match kind:
            case "propose":
                await _unknown(stranger, propose(1, 1, [5]))
            case "truncate":
                stranger.tell(pb.Truncate(slot=1, committed_len=1))
            case "close":
                stranger.tell(pb.CloseSlot(slot=1))
            case "open":
                await stranger.opened(1, (3, 4), **route)
        await _unknown(stranger, propose(2, 1, [5]))  # what was sent before it has been done
        longer = reference.greedy(PROMPT, 2)
        reply = await draft.ask(propose(1, len(PROMPT), longer))
    assert list(reply.draft_ids) == reference.greedy((*PROMPT, *longer), K)
    assert reply.num_fed_tokens < K, "nothing that it had cached was taken away"


# proposals for others' rounds


async def test_proposals_under_guessed_tickets_change_nothing_but_counters(
    target: ControlClient, target_worker: Process, reference: ReferenceModel
) -> None:
    """A draft that is let in sprays proposals: tickets near the true ones, and thousands at random."""
    await target.opened(1, PROMPT)
    expected = reference.greedy(PROMPT, 6 * (K + 1))
    before = await target.metrics()
    committed = list(PROMPT)

    async with ControlClient(target_worker.address, "target") as stranger, DeliverClient(stranger) as spray:
        tickets: list[int] = []

        async def spray_some(count: int) -> None:
            near = [(ticket + by) % 2**64 for ticket in tickets[-2:] for by in (-1, 1)]
            guesses = [*near, *(secrets.randbits(64) for _ in range(count))]
            wrong = [(committed[-1] + 7) % 320] * K
            await spray.send(*(delivery(stranger, guess, len(committed), wrong) for guess in guesses))

        async def spray_for_ever() -> None:
            while True:
                await spray_some(50)
                await asyncio.sleep(0.02)

        for _ in range(2):  # more than the target parks
            await spray_some(1000)
        spraying = asyncio.create_task(spray_for_ever())
        for _ in range(6):
            tickets.append(secrets.randbits(64))
            round_ = target.start(verify(1, 0, committed, k=K, ticket=tickets[-1]))
            await asyncio.sleep(0.05)
            drafts = expected[len(committed) - len(PROMPT) :][:K]
            await deliver(target, delivery(target, tickets[-1], len(committed), drafts))
            verdict = await asyncio.wait_for(round_, 30)
            assert (verdict.num_drafted, verdict.num_accepted) == (K, K)
            committed += verdict.token_ids
        spraying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await spraying
    assert committed == [*PROMPT, *expected]
    assert (await target.info()).num_tickets <= 1024
    target.tell(pb.CloseSlot(slot=1))
    await eventually(idle, target)  # what nobody asked for expires
    after = await target.metrics()
    num_dropped = sum(dropped(after, why) - dropped(before, why) for why in ("overflow", "expired", "late"))
    assert num_dropped > 1024 * K


async def test_a_control_message_larger_than_any_can_be_is_refused_before_it_is_parsed(
    target: ControlClient, target_worker: Process
) -> None:
    limit = max_control_bytes((await target.info()).context_limit)
    huge = tpb.TargetRequest(id=1, epoch=target.epoch, open=pb.OpenSlot(slot=1, committed_ids=[5] * (limit + 1)))
    stub = target_pb2_grpc.TargetServiceStub(target.channel)
    call: Any = stub.Control(timeout=60.0)
    await call.write(tpb.TargetRequestBatch(items=[huge]))
    with pytest.raises(grpc.aio.AioRpcError, match="at most") as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_more_ids_than_a_context_are_refused_for_their_number(target: ControlClient) -> None:
    limit = (await target.info()).context_limit
    reply = await target.ask(verify(1, 0, [5] * (limit + 1)))
    assert reply.code == pb.WORKER_ERROR_CODE_INVALID
    assert reply.message == f"{limit + 1} committed ids, the context limit is {limit}"
