"""A bare gateway's and a bare draft's end of the worker streams, for tests that send what a real peer never would."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import grpc.aio
import torch

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import SamplingParams
from outrider.wire.transport.codec import rows_to_proto
from outrider.wire.transport.rpc import client_options
from outrider.wire.transport.streams import Outbox
from tests.stack import read_metrics
from tests.wire_rows import encode_rows

TIMEOUT_S = 60.0
LONG_BUDGET_S = 60.0
"""A wait budget that no passing test ever waits out."""
AT_ONCE_S = 15.0
"""Far below LONG_BUDGET_S, far above what a busy machine makes of a tiny forward."""

_FIELDS = {
    pb.OpenSlot: "open",
    tpb.Verify: "verify",
    dpb.Propose: "propose",
    pb.Truncate: "truncate",
    pb.CloseSlot: "close",
}
_tickets = itertools.count(1)


class ControlClient:
    """One Control stream. `ask` returns the message inside the reply: OpenReply, Verdict, ProposeReply, WorkerError."""

    def __init__(self, address: str, worker: Literal["target", "draft"]) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=client_options(64 << 20))
        self.stub: Any
        if worker == "target":
            self.stub = target_pb2_grpc.TargetServiceStub(self.channel)
            self._request, self._batch = tpb.TargetRequest, tpb.TargetRequestBatch
        else:
            self.stub = draft_pb2_grpc.DraftServiceStub(self.channel)
            self._request, self._batch = dpb.DraftRequest, dpb.DraftRequestBatch
        self.epoch = 0
        self._ids = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> ControlClient:
        self.epoch = (await self.info()).epoch
        self.stream = self.stub.Control()

        async def write(items: list[Any]) -> None:
            await self.stream.write(self._batch(items=items))

        self._outbox: Outbox[Any] = Outbox(write, self.stream.cancel)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stream.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._outbox.close()
        await self.channel.close()

    async def _read(self) -> None:
        async for batch in self.stream:
            for reply in batch.items:
                self._futures[reply.id].set_result(getattr(reply, reply.WhichOneof("item")))

    async def info(self) -> pb.WorkerInfo:
        return await self.stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        return await asyncio.to_thread(read_metrics, f"http://{(await self.info()).metrics_address}/metrics")

    def tell(self, item: Any, epoch: int | None = None) -> None:
        """One way."""
        self._outbox.put(self._wrap(item, 0, epoch))

    def start(self, item: Any, epoch: int | None = None) -> asyncio.Future[Any]:
        """Send; the future has the reply. None sends a message without an item."""
        message_id = next(self._ids)
        future = self._futures[message_id] = asyncio.get_running_loop().create_future()
        self._outbox.put(self._wrap(item, message_id, epoch))
        return future

    def _wrap(self, item: Any, message_id: int, epoch: int | None) -> Any:
        fields = {} if item is None else {_FIELDS[type(item)]: item}
        return self._request(id=message_id, epoch=self.epoch if epoch is None else epoch, **fields)

    async def ask(self, item: Any, epoch: int | None = None) -> Any:
        return await asyncio.wait_for(self.start(item, epoch), TIMEOUT_S)

    async def ask_at_once(self, item: Any) -> Any:
        """Fails when the answer takes a good part of LONG_BUDGET_S."""
        return await asyncio.wait_for(self.start(item), AT_ONCE_S)

    async def opened(self, slot: int, prompt: Sequence[int], **options: Any) -> None:
        """Open a slot that must be accepted."""
        reply = await self.ask(open_slot(slot, prompt, **options))
        assert isinstance(reply, pb.OpenReply), reply
        assert reply.committed_len == len(prompt)


class DeliverClient:
    """One Deliver stream, as a draft holds one."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    async def __aenter__(self) -> DeliverClient:
        self._call = self._client.stub.Deliver()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()

    async def send(self, *items: tpb.Delivery) -> None:
        await self._call.write(tpb.DeliveryBatch(items=items))

    async def finish(self) -> tpb.DeliverSummary:
        """Every delivery sent before has then been taken in."""
        await self._call.done_writing()
        return await asyncio.wait_for(self._call, TIMEOUT_S)


async def deliver(client: ControlClient, *items: tpb.Delivery) -> tpb.DeliverSummary:
    """On a stream of its own; returns when the target has taken them in."""
    async with DeliverClient(client) as stream:
        await stream.send(*items)
        return await stream.finish()


def new_ticket() -> int:
    return next(_tickets)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, **options})


def open_slot(slot: int, prompt: Sequence[int], *, num_prompt: int | None = None, **options: Any) -> pb.OpenSlot:
    """Options are SamplingParams' fields, deliver_to and target_epoch; greedy, 32 tokens and no EOS by default."""
    route = {name: options.pop(name) for name in ("deliver_to", "target_epoch") if name in options}
    num_prompt = len(prompt) if num_prompt is None else num_prompt
    params = sampling(**options).to_proto()
    return pb.OpenSlot(slot=slot, committed_ids=prompt, num_prompt_tokens=num_prompt, params=params, **route)


def verify(
    slot: int, base_len: int, ids: Iterable[int] = (), k: int = 0, ticket: int = 0, budget_s: float = LONG_BUDGET_S
) -> tpb.Verify:
    return tpb.Verify(
        slot=slot,
        base_len=base_len,
        committed_ids=ids,
        num_draft_tokens=k,
        ticket=ticket,
        wait_budget_us=int(budget_s * 1e6),
    )


def delivery(
    client: ControlClient,
    ticket: int,
    committed_len: int,
    ids: Sequence[int],
    log_probs: torch.Tensor | None = None,
    *,
    sparse: bool = False,
    start: int = 0,
    of: int | None = None,
) -> tpb.Delivery:
    """log_probs: [len(ids), V] float32, None for ids only. `of`: tokens of the whole proposal, when this is a part."""
    distributions = None
    if log_probs is not None:
        rows = encode_rows(log_probs, prefer_sparse=sparse)
        distributions = rows_to_proto(rows, log_probs.shape[1])
    return tpb.Delivery(
        ticket=ticket,
        target_epoch=client.epoch,
        committed_len=committed_len,
        start=start,
        draft_ids=ids,
        distributions=distributions,
        num_draft_tokens=len(ids) if of is None else of,
    )


async def eventually(check: Callable[[pb.WorkerInfo], bool], client: ControlClient, timeout_s: float = 20.0) -> None:
    """Until GetInfo satisfies `check`."""
    deadline = time.monotonic() + timeout_s
    while not check(info := await client.info()):
        assert time.monotonic() < deadline, f"still {info}"
        await asyncio.sleep(0.02)


def idle(info: pb.WorkerInfo) -> bool:
    """Nothing is held."""
    return info.num_slots_in_use == 0 and info.num_kv_blocks_in_use == 0 and info.num_tickets == 0
