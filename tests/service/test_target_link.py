"""Our ends of the long-lived streams against the other side's faults and our own: a slow reader, a broken answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio
import pytest

from draft_service.targets import target_link
from draft_service.targets.deliveries import Deliverer
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseDistributions
from outrider.wire.transport.streams import ControlStreams
from tests.service.front_door import grpc_server
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 1 << 16
PART_BYTES = 4 * VOCAB_SIZE
NUM_PARTS = 200
"""50 MB: several times what gRPC takes in for a reader that does not read."""
MAX_MESSAGE_BYTES = 64 << 20


class SlowTarget(target_pb2_grpc.TargetServiceServicer):
    """Reads nothing until it may."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.tickets: list[int] = []

    async def Deliver(self, batches: AsyncIterator[tpb.DeliveryBatch], context: Any) -> AsyncIterator[tpb.FeatureBatch]:
        await self.may_read.wait()
        async for batch in batches:
            self.tickets.extend(item.ticket for item in batch.items)
        yield tpb.FeatureBatch(summary=tpb.DeliverSummary())


@asynccontextmanager
async def delivering(target: SlowTarget, metrics: WorkerMetrics) -> AsyncIterator[tuple[Deliverer, str]]:
    """What sends to it, and its address."""
    add = partial(target_pb2_grpc.add_TargetServiceServicer_to_server, target)
    async with grpc_server(add, MAX_MESSAGE_BYTES) as address:
        deliverer = Deliverer(metrics, lambda job: None)
        try:
            yield deliverer, address
        finally:
            await deliverer.close()


def with_law(ticket: int) -> Delivery:
    """One token and its law."""
    law = DenseDistributions(1, bytes(PART_BYTES))
    return Delivery(ticket, 10, (3,), (ROOT,), (0,), (NodeKind.SAMPLED,), law, vocab_size=VOCAB_SIZE)


def dropped(metrics: WorkerMetrics) -> int:
    """Count the draft tokens that did not leave."""
    value = metrics.registry.get_sample_value("outrider_worker_dropped_draft_tokens_total", {"worker": "draft"})
    return int(value or 0)


async def test_a_target_that_does_not_read_costs_a_bounded_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest parts are dropped and counted; once it reads, what was queued arrives and new parts go out again."""
    monkeypatch.setattr(target_link, "MAX_BACKLOG_BYTES", 8 * PART_BYTES + 8 * 100)
    target, metrics = SlowTarget(), WorkerMetrics("draft")

    async with delivering(target, metrics) as (deliverer, address):

        def send(ticket: int) -> None:
            deliverer.send(address, 7, with_law(ticket))

        send(1)
        await asyncio.sleep(0.5)  # the first one is on the wire, in the receiver's window or before it
        for ticket in range(2, NUM_PARTS + 1):
            send(ticket)
            await asyncio.sleep(0.002)
        num_dropped = dropped(metrics)
        assert NUM_PARTS // 2 <= num_dropped <= NUM_PARTS - 8 and deliverer._links[address]._backlog_bytes <= 8 * (
            PART_BYTES + 100
        )
        target.may_read.set()
        await until(lambda: len(target.tickets) == NUM_PARTS - num_dropped)
        assert target.tickets[:8] == list(range(1, 9)) and target.tickets == sorted(target.tickets)
        await until(lambda: deliverer._links[address]._backlog_bytes == 0)
        send(99)
        await until(lambda: target.tickets[-1] == 99)
        assert dropped(metrics) == num_dropped


async def test_a_part_larger_than_the_backlog_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_link, "MAX_BACKLOG_BYTES", 100)
    target, metrics = SlowTarget(), WorkerMetrics("draft")

    target.may_read.set()
    async with delivering(target, metrics) as (deliverer, address):
        for ticket in (1, 2):
            deliverer.send(address, 7, with_law(ticket))
        await until(lambda: target.tickets == [1])
        assert dropped(metrics) == 1


class BrokenDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers an open as it should, anything else with what is no reply."""

    def __init__(self) -> None:
        self.streams = ControlStreams()
        self.gone: list[int] = []

    async def Control(self, requests: AsyncIterator[dpb.DraftRequestBatch], context: Any) -> None:
        await self.streams.serve(
            requests,
            context,
            make_batch=lambda items: dpb.DraftReplyBatch(items=items),
            dispatch=lambda owner, item, put: put(
                dpb.DraftReply(id=item.id, open=pb.OpenReply()) if item.HasField("open") else object()
            ),
            on_end=self.gone.append,
        )


async def test_an_answer_that_cannot_be_written_ends_the_stream_at_once() -> None:
    """Its client would otherwise wait out its time for an answer that will never come."""
    draft = BrokenDraft()

    add = partial(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft)
    async with grpc_server(add, MAX_MESSAGE_BYTES) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Control()
            await call.write(dpb.DraftRequestBatch(items=[dpb.DraftRequest(id=1, open=pb.OpenSlot())]))
            assert (await call.read()).items[0].id == 1
            await call.write(dpb.DraftRequestBatch(items=[dpb.DraftRequest(id=2, advance=dpb.Advance())]))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(call.read(), 10)
            assert error.value.code() == grpc.StatusCode.INTERNAL
            assert "could not be written" in str(error.value.details())
        await until(lambda: draft.gone == [1])
