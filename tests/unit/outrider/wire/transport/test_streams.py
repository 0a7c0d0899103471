"""The writer that coalesces and the reader that matches."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import WorkerLost
from outrider.wire.transport import streams
from outrider.wire.transport.streams import MAX_BATCH_ITEMS, Outbox, PendingReplies


class Wire:
    """Records batches; `gate` closed makes a write take until it opens; `error` makes it fail."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.num_ends = 0

    async def write(self, batch: list[int]) -> None:
        self.batches.append(batch)
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self.num_ends += 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_queues_during_a_write_leaves_as_one() -> None:
    wire = Wire()
    wire.gate.clear()
    outbox: Outbox[int] = Outbox(wire.write, wire.end)
    outbox.put(0)
    await settle()
    for i in range(1, 100):
        outbox.put(i)
    await settle()
    assert wire.batches == [[0]]
    wire.gate.set()
    await settle()
    assert wire.batches == [[0], list(range(1, 100))]
    await outbox.close()


async def test_batches_are_bounded_and_in_order() -> None:
    wire = Wire()
    outbox: Outbox[int] = Outbox(wire.write, wire.end)
    for i in range(2 * MAX_BATCH_ITEMS + 2):
        outbox.put(i)
    await settle()
    assert [len(batch) for batch in wire.batches] == [MAX_BATCH_ITEMS, MAX_BATCH_ITEMS, 2]
    assert [i for batch in wire.batches for i in batch] == list(range(2 * MAX_BATCH_ITEMS + 2))
    await outbox.close()


@pytest.mark.parametrize(
    "error",
    [
        asyncio.InvalidStateError("RPC already finished."),
        grpc.aio.UsageError("ended"),
        grpc.aio.InternalError("the peer died while it was sent"),
        asyncio.CancelledError(),
        ValueError("cannot be serialised"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_writer_that_fails_holds_nothing(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever ended the stream, what is put afterwards must not pile up. That a peer died is no error of ours."""
    wire = Wire()
    wire.error = error
    outbox: Outbox[int] = Outbox(wire.write, wire.end)
    outbox.put(1)
    await settle()
    for i in range(1000):
        outbox.put(i)
    await settle()
    assert wire.batches == [[1]]
    assert bool(caplog.records) == isinstance(error, ValueError)
    assert not outbox._queue
    # The reader tells of streams that ended; one that is up has to be ended, or nobody ever hears of this.
    assert wire.num_ends == (1 if isinstance(error, ValueError) else 0)
    await outbox.close()


@dataclass
class Reply:
    id: int
    text: str = ""


async def batches(*items: list[Reply] | Exception) -> AsyncIterator[list[Reply]]:
    for item in items:
        await asyncio.sleep(0)
        if isinstance(item, Exception):
            raise item
        yield item


async def test_replies_find_their_callers_in_any_order() -> None:
    pending: PendingReplies[Reply] = PendingReplies()
    calls = [pending.new() for _ in range(4)]
    ids = [message_id for message_id, _ in calls]
    assert len(set(ids)) == 4 and 0 not in ids, "0 marks what is not answered"
    reading = pending.read(batches([Reply(ids[2], "c"), Reply(ids[0], "a")], [Reply(ids[3], "d"), Reply(ids[1], "b")]))
    await reading
    assert [(await future).text for _, future in calls] == ["a", "b", "c", "d"]
    await settle()
    assert len(pending) == 0


@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_the_end_of_the_stream_fails_who_waits(how: str) -> None:
    pending: PendingReplies[Reply] = PendingReplies()
    _, future = pending.new()
    none = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "socket closed")  # type: ignore[call-arg]
    await pending.read(batches(*([broken] if how == "breaks" else [])))
    with pytest.raises(WorkerLost, match="UNAVAILABLE: socket closed" if how == "breaks" else "the stream ended"):
        await future
    await settle()
    assert len(pending) == 0


async def test_answers_of_a_worker_fit_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_MESSAGE_BYTES", (1 << 16) + 20)
    batches: list[int] = []

    class Context:
        async def send_initial_metadata(self, metadata: object) -> None: ...

        async def write(self, items: list[pb.TokenizerFiles]) -> None:
            batches.append(len(items))

    async def requests() -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(items=range(5))
        await settle()

    context: Any = Context()
    item = pb.TokenizerFiles(tokenizer_json=b"12345678")
    await streams.ControlStreams().serve(
        requests(), context, lambda items: items, lambda owner, _, put: put(item), lambda owner: None
    )
    assert item.ByteSize() == 10 and batches == [2, 2, 1]
