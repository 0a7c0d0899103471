"""What a draft asks for on its stream to a target, what it is answered, and what waits when it does not read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from outrider.engine.memory import SpareMemory
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest, Unavailable
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.streams import ControlStreams
from target_service.features import feature_stream as module
from target_service.features.feature_stream import FeatureStream
from target_service.features.features import FeatureJob, FeatureSubscription
from target_service.features.registered_heads import Heads
from target_service.servicer import TargetServicer

EPOCH, DIGEST, PEER = 7, b"d" * 32, "ipv4:10.0.0.1:40000"
SERIES = "outrider_worker_feature_rows_total"


class Stream:
    """One stream, whose draft may stop reading. The head DIGEST is ready on it."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.batches: list[tpb.FeatureBatch] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.metrics = WorkerMetrics("target")
        self.heads = Heads(self, self.metrics, 8, 2, None, SpareMemory(1 << 20))  # type: ignore[arg-type]
        self.heads.is_ready = lambda stream, digest: digest == DIGEST  # type: ignore[method-assign]
        self.stream = FeatureStream(PEER, EPOCH, self.heads, self, self.metrics, self.write, lambda: None)  # type: ignore

    def submit(self, job: FeatureJob) -> None:
        job.run(self)  # type: ignore[arg-type]

    # as `Features`

    def subscribe(self, subscription: FeatureSubscription) -> None:
        self.jobs.append(subscription)

    def end_link(self, link: FeatureStream) -> None:
        self.jobs.append(link)

    def answer(self, send: Callable[[], None]) -> None:
        send()

    async def write(self, batch: tpb.FeatureBatch) -> None:
        await self.may_write.wait()
        self.batches.append(batch)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def count(self, what: str, fate: str) -> float:
        name = f"outrider_worker_feature_{what}_total"
        return float(self.metrics.registry.get_sample_value(name, self.labels(fate)) or 0)

    def labels(self, fate: str) -> dict[str, str]:
        return {"worker": "target", "peer": PEER, "fate": fate}

    @property
    def wanted(self) -> FeatureSubscription:
        return FeatureSubscription(self.stream, DIGEST, 5, 2, 9)

    def want(self) -> None:
        self.stream.handle(rows_wanted())


def rows_wanted(epoch: int = EPOCH, digest: bytes = DIGEST) -> tpb.HeadRequest:
    return tpb.HeadRequest(features=tpb.FeatureRequest(target_epoch=epoch, ticket=5, digest=digest, start=2, id=9))


@asynccontextmanager
async def streaming() -> AsyncIterator[Stream]:
    made = Stream()
    yield made
    await made.stream.close()


async def test_rows_go_to_the_engine_and_come_back_as_messages() -> None:
    async with streaming() as made:
        made.want()
        (job,) = made.jobs
        assert (job.link, job.digest, job.ticket, job.next_position, job.request_id) == (made.stream, DIGEST, 5, 2, 9)
        made.stream.send_features(made.wanted, 2, 3, b"abcdef")
        await made.settle()
        (batch,) = made.batches
        (rows,) = batch.chunks
        assert (rows.ticket, rows.target_epoch, rows.start, rows.num_tokens, rows.data) == (5, EPOCH, 2, 3, b"abcdef")
        assert rows.request_id == 9
        assert (made.count("rows", "sent"), made.count("bytes", "sent")) == (3, 6)
    assert made.jobs[1:] == [made.stream]
    assert made.metrics.registry.get_sample_value(SERIES, made.labels("sent")) is None, "it ends with the link"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (rows_wanted(epoch=8), "for target epoch 8, this is 7"),
        (rows_wanted(digest=b"x" * 32), "register it first"),
        (tpb.HeadRequest(head=tpb.HeadSpec(target_epoch=8, digest=DIGEST, num_bytes=9)), "epoch 8"),
    ],
    ids=["rows of another life", "rows of another head", "a head of another life"],
)
async def test_what_is_of_another_life_or_head_is_refused(asked: tpb.HeadRequest, why: str) -> None:
    async with streaming() as made:
        made.stream.handle(asked)
        made.stream.handle(tpb.HeadRequest())
        await made.settle()
        (reply,) = made.batches[0].head_replies
        assert reply.state == tpb.HEAD_STATE_REFUSED and why in reply.reason and not made.jobs


async def test_a_draft_that_does_not_read_has_a_bounded_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG_BYTES", 10)
    async with streaming() as made:
        made.want()
        made.may_write.clear()
        for start in range(3):
            assert made.stream.has_capacity
            made.stream.send_features(made.wanted, start, 1, b"abcd")
        assert not made.stream.has_capacity
        made.stream.count("dropped", 2, 8)
        assert (made.count("rows", "dropped"), made.count("bytes", "dropped")) == (2, 8)
        made.may_write.set()
        await made.settle()
        assert made.stream.has_capacity and sum(len(batch.chunks) for batch in made.batches) == 3


async def test_no_more_is_taken_of_a_draft_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD", 5)
    may_write, num_taken, written = asyncio.Event(), 0, list[tpb.FeatureBatch]()

    async def write(batch: tpb.FeatureBatch) -> None:
        await may_write.wait()
        written.append(batch)

    async def batches() -> AsyncIterator[tpb.DeliveryBatch]:
        nonlocal num_taken
        for number in range(40):
            num_taken += 1
            head = tpb.HeadSpec(target_epoch=8, digest=bytes([number]))
            yield tpb.DeliveryBatch(head_requests=[tpb.HeadRequest(head=head)])

    made = Stream()
    context = SimpleNamespace(send_initial_metadata=AsyncMock(), write=write, peer=lambda: PEER)
    service = SimpleNamespace(engine=made, epoch=EPOCH, streams=ControlStreams())
    servicer = TargetServicer(service, 9, lambda nodes: True, made.heads, made.metrics)  # type: ignore[arg-type]
    delivering = asyncio.create_task(servicer.Deliver(batches(), context))  # type: ignore[arg-type]
    await made.settle()
    assert num_taken == 6, "of what waits, and the one that was one too many"
    may_write.set()
    await delivering
    assert num_taken == sum(len(batch.head_replies) for batch in written) == 40
    await made.stream.close()


async def test_probes_go_one_at_a_time() -> None:
    waiting, found = list[FeatureJob](), {1: tpb.ProbeReply(taps=b"taps", best_ids=[3, 4])}

    class Probed:
        def probe(self, token_ids: Any, taps: Any) -> tpb.ProbeReply:
            if token_ids[0] not in found:
                raise Unavailable("no blocks")
            return found[token_ids[0]]

    async with streaming() as made:
        engine: Any = SimpleNamespace(submit=waiting.append)
        engine.call = partial(EngineThread.call, engine)
        service: Any = SimpleNamespace(engine=engine, epoch=EPOCH, streams=ControlStreams())
        servicer = TargetServicer(service, 9, lambda nodes: True, made.heads, made.metrics)

        def probe(first_id: int) -> asyncio.Task[tpb.ProbeReply]:
            request = tpb.ProbeRequest(target_epoch=EPOCH, token_ids=[first_id, 2], taps=[0])
            return asyncio.create_task(servicer.Probe(request, None))

        first, second, third = probe(1), probe(1), probe(5)
        await made.settle()
        assert len(waiting) == 1
        waiting[0].run(Probed())  # type: ignore[arg-type]
        assert (await first).taps == b"taps"
        await made.settle()
        second.cancel()  # its draft has gone
        await made.settle()
        for job in waiting[1:]:
            job.run(Probed())  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="no blocks"):
            await third
        with pytest.raises(InvalidRequest, match="0 tokens"):
            await servicer.Probe(tpb.ProbeRequest(target_epoch=EPOCH, taps=[0]), None)
        with pytest.raises(Unavailable, match="another life"):
            await servicer.Probe(tpb.ProbeRequest(target_epoch=8), None)
        assert len(waiting) == 3


async def test_many_rows_leave_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 8)
    async with streaming() as made:
        made.stream.send_features(made.wanted, 10, 5, bytes(range(20)))
        await made.settle()
        parts = [rows for batch in made.batches for rows in batch.chunks]
        assert [(rows.start, rows.num_tokens) for rows in parts] == [(10, 2), (12, 2), (14, 1)]
        assert b"".join(rows.data for rows in parts) == bytes(range(20))


async def test_the_summary_is_last_and_waits_for_what_is_before_it() -> None:
    async with streaming() as made:
        made.may_write.clear()
        made.stream.send_features(made.wanted, 0, 1, b"ab")
        await made.settle()
        finishing = asyncio.create_task(made.stream.finish(tpb.DeliverSummary(num_deliveries=4)))
        await made.settle()
        assert not finishing.done()
        made.stream.send_features(made.wanted, 1, 1, b"cd")  # too late
        made.may_write.set()
        await finishing
        assert made.batches[0].chunks and made.batches[-1].summary.num_deliveries == 4
        assert sum(len(batch.chunks) for batch in made.batches) == 1
