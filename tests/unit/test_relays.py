"""The relays that tests and benchmarks put between parts, before servers that only record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from tests.message_relay import Fate, Faults, MessageRelay, as_it_comes
from tests.tcp_relay import TcpRelay


class Recorder(target_pb2_grpc.TargetServiceServicer):
    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.requests: list[str] = []
        self.ended = asyncio.Event()
        """A Control stream has."""
        self.address = ""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(model_id="recorder")

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no tokenizer here", (("why", "none"),))
        raise AssertionError("unreachable")

    async def Deliver(self, batches: AsyncIterator[tpb.DeliveryBatch], context: Any) -> AsyncIterator[tpb.FeatureBatch]:
        async for batch in batches:
            self.tickets += [item.ticket for item in batch.items]
            for ask in batch.asks:
                if ask.WhichOneof("item") == "rows":
                    yield tpb.FeatureBatch(rows=[tpb.FeatureRows(start=ask.rows.start + i) for i in range(4)])
                else:
                    yield tpb.FeatureBatch(heads=[tpb.HeadReply(digest=ask.head.digest)])
        yield tpb.FeatureBatch(summary=tpb.DeliverSummary(num_deliveries=len(self.tickets)))

    async def Control(
        self, batches: AsyncIterator[tpb.TargetRequestBatch], context: Any
    ) -> AsyncIterator[tpb.TargetReplyBatch]:
        try:
            async for batch in batches:
                for item in batch.items:
                    self.requests.append(str(item.WhichOneof("item")))
                    if item.id:
                        yield tpb.TargetReplyBatch(items=[tpb.TargetReply(id=item.id)])
        finally:
            self.ended.set()


@asynccontextmanager
async def recording(fate: Fate = as_it_comes) -> AsyncIterator[tuple[Recorder, MessageRelay, Any]]:
    """A server, the relay before it, and a stub that speaks to the relay."""
    recorder, server = Recorder(), grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(recorder, server)
    recorder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with (
        MessageRelay(recorder.address, fate) as relay,
        grpc.aio.insecure_channel(relay.address) as channel,
    ):
        yield recorder, relay, target_pb2_grpc.TargetServiceStub(channel)
    await server.stop(0)


async def deliver(stub: Any, num: int) -> tpb.DeliverSummary:
    async def batches() -> AsyncIterator[tpb.DeliveryBatch]:
        for first in range(0, num, 2):
            yield tpb.DeliveryBatch(items=[tpb.Delivery(ticket=first + i) for i in range(2)])
            await asyncio.sleep(0)

    return await summary_of(stub.Deliver(batches()))


async def summary_of(call: Any) -> tpb.DeliverSummary:
    (batch,) = [batch async for batch in call]
    return batch.summary


async def test_every_kind_of_call_passes_with_its_status() -> None:
    async with recording() as (recorder, relay, stub):
        assert (await stub.GetInfo(pb.GetInfoRequest())).model_id == "recorder"
        with pytest.raises(grpc.aio.AioRpcError, match="no tokenizer here") as raised:
            await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert ("why", "none") in tuple(raised.value.trailing_metadata())
        assert (await deliver(stub, 20)).num_deliveries == 20
        assert recorder.tickets == list(range(20))
        assert sum(map(len, relay.batches)) == 20 and relay.num_held == 0


async def test_deliveries_are_dropped_repeated_and_reordered() -> None:
    faults = Faults(seed=1, drop=0.2, repeat=0.2, reorder=0.2)
    async with recording(faults) as (recorder, _, stub):
        await deliver(stub, 200)
    assert 20 < faults.num_dropped < 60 and faults.num_repeated > 10 and faults.num_reordered > 10
    assert len(set(recorder.tickets)) == 200 - faults.num_dropped
    assert len(recorder.tickets) == 200 - faults.num_dropped + faults.num_repeated
    firsts = list(dict.fromkeys(recorder.tickets))
    assert firsts != sorted(firsts)
    again = Faults(seed=1, drop=0.2, repeat=0.2, reorder=0.2)
    assert [again(tpb.Delivery()) for _ in range(200)].count(()) == faults.num_dropped


async def test_rows_and_what_asks_for_them_are_lost_and_late_and_heads_pass_as_they_come() -> None:
    faults = Faults(seed=1, drop=0.2, repeat=0.2, reorder=0.2)
    asks = [tpb.FeatureAsk(rows=tpb.FeatureRequest(start=4 * i)) for i in range(50)]
    heads = [tpb.FeatureAsk(head=tpb.HeadSpec(digest=bytes([i]))) for i in range(50)]
    async with recording(faults) as (_, _, stub):
        call = stub.Deliver()
        for pair in zip(asks, heads, strict=True):
            await call.write(tpb.DeliveryBatch(asks=pair))
        await asyncio.sleep(4 * faults.late_s)
        await call.done_writing()
        batches = [batch async for batch in call]
    starts = [rows.start for batch in batches for rows in batch.rows]
    assert [reply.digest[0] for batch in batches for reply in batch.heads] == list(range(50))
    assert batches[-1].HasField("summary")
    assert 60 < len(set(starts)) < 190 and len(set(starts)) < len(starts)
    assert [start for start in dict.fromkeys(starts) if start % 4] != sorted(
        start for start in set(starts) if start % 4
    )


async def test_what_is_answered_is_never_touched() -> None:
    async with recording(Faults(drop=1.0)) as (recorder, _, stub):
        call = stub.Control()
        items = [
            tpb.TargetRequest(extend=tpb.Extend(slot=1)),
            tpb.TargetRequest(id=7, verify=tpb.Verify(slot=1)),
            tpb.TargetRequest(truncate=pb.Truncate(slot=1)),
        ]
        await call.write(tpb.TargetRequestBatch(items=items))
        assert (await call.read()).items[0].id == 7
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    assert recorder.requests == ["verify", "truncate"]


async def test_a_gateway_that_ends_its_call_ends_the_one_behind_it() -> None:
    async with recording() as (recorder, _, stub):
        call = stub.Control()
        await call.write(tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=1, verify=tpb.Verify(slot=1))]))
        await call.read()
        call.cancel()
        await asyncio.wait_for(recorder.ended.wait(), 5)


async def test_a_round_trip_and_a_bandwidth() -> None:
    async with (
        recording() as (recorder, _, _),
        TcpRelay(recorder.address) as relay,
        grpc.aio.insecure_channel(relay.address) as channel,
    ):
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        await stub.GetInfo(pb.GetInfoRequest())
        relay.delay_s = 0.05
        started = time.monotonic()
        await stub.GetInfo(pb.GetInfoRequest())
        assert 0.1 <= time.monotonic() - started < 1.0
        relay.delay_s, relay.bandwidth = 0.0, 1e6
        started = time.monotonic()
        await summary_of(stub.Deliver(aiter_of(tpb.DeliveryBatch(items=[tpb.Delivery(ids=bytes(200_000))]))))
        assert 0.2 <= time.monotonic() - started < 2.0


async def aiter_of(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item
