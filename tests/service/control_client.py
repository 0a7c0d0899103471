"""A bare gateway's and a bare draft's end of the worker streams, for tests that send what a real peer never would."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import grpc.aio
import torch

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind, write_delivery
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.transport.rpc import client_options
from outrider.wire.transport.streams import Outbox
from tests.stack import read_metrics
from tests.wire_rows import encode_rows

TIMEOUT_S = 60.0
AT_ONCE_S = 15.0
"""Far above what a busy machine makes of a tiny forward."""
NOBODYS_SLOT = 1 << 40
"""A slot that no test opens."""

_FIELDS = {
    pb.OpenSlot: "open",
    tpb.Verify: "verify",
    tpb.Extend: "extend",
    dpb.Advance: "advance",
    pb.Truncate: "truncate",
    pb.CloseSlot: "close",
}
_tickets = itertools.count(1)


class ControlClient:
    """One Control stream. `ask` returns the message inside the first reply: OpenReply, Verdict, WorkerError."""

    def __init__(self, address: str, worker: Literal["target", "draft"]) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=client_options(address, 64 << 20))
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
        self._followed: dict[int, asyncio.Queue[Any]] = {}

    async def __aenter__(self) -> "ControlClient":
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
        await self.channel.close()  # type: ignore[call-arg]

    async def _read(self) -> None:
        async for batch in self.stream:
            for reply in batch.items:
                item = getattr(reply, reply.WhichOneof("item"))
                if reply.id in self._followed:
                    self._followed[reply.id].put_nowait(item)
                elif not (future := self._futures[reply.id]).done():  # later ones: a lease that is over was ended
                    future.set_result(item)

    async def info(self) -> pb.WorkerInfo:
        return await self.stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        return await asyncio.to_thread(read_metrics, f"http://{(await self.info()).metrics_address}/metrics")

    def tell(self, item: Any, epoch: int | None = None) -> None:
        """One way."""
        self._outbox.put(self._wrap(item, 0, epoch))

    def start(self, item: Any, epoch: int | None = None) -> asyncio.Future[Any]:
        """Send; the future has the first reply. None sends a message without an item."""
        message_id = next(self._ids)
        future = self._futures[message_id] = asyncio.get_running_loop().create_future()
        self._outbox.put(self._wrap(item, message_id, epoch))
        return future

    def follow(self, item: Any) -> "Replies":
        """Send; all replies come from what is returned, a lease's verdicts one by one."""
        message_id = next(self._ids)
        queue = self._followed[message_id] = asyncio.Queue[Any]()
        self._outbox.put(self._wrap(item, message_id, None))
        return Replies(queue)

    async def taken(self) -> None:
        """Return when all that was sent has been taken in by the worker's engine."""
        item = verify(NOBODYS_SLOT, 1) if self._request is tpb.TargetRequest else open_slot(NOBODYS_SLOT, [])
        assert isinstance(await self.ask(item), pb.WorkerError)

    def _wrap(self, item: Any, message_id: int, epoch: int | None) -> Any:
        fields = {} if item is None else {_FIELDS[type(item)]: item}
        return self._request(id=message_id, epoch=self.epoch if epoch is None else epoch, **fields)

    async def ask(self, item: Any, epoch: int | None = None) -> Any:
        return await asyncio.wait_for(self.start(item, epoch), TIMEOUT_S)

    async def ask_at_once(self, item: Any) -> Any:
        """Fails when the answer takes long."""
        return await asyncio.wait_for(self.start(item), AT_ONCE_S)

    async def opened(self, slot: int, prompt: Sequence[int], **options: Any) -> None:
        """Open a slot that must be accepted."""
        reply = await self.ask(open_slot(slot, prompt, **options))
        assert isinstance(reply, pb.OpenReply), reply
        assert reply.committed_len == len(prompt)


class Replies:
    """What comes under one message's id."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def next(self) -> Any:
        return await asyncio.wait_for(self._queue.get(), TIMEOUT_S)

    async def verdicts(self, num: int) -> list[tpb.Verdict]:
        found = [await self.next() for _ in range(num)]
        assert all(isinstance(each, tpb.Verdict) for each in found), found
        return found

    @property
    def empty(self) -> bool:
        return self._queue.empty()


class DeliverClient:
    """One Deliver stream, as a draft holds one."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    async def __aenter__(self) -> "DeliverClient":
        self._call = self._client.stub.Deliver()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()

    async def send(self, *items: tpb.Delivery) -> None:
        await self._call.write(tpb.DeliveryBatch(items=items))

    async def finish(self) -> tpb.DeliverSummary:
        """Every delivery sent before has then been taken in."""
        await self._call.done_writing()
        async with asyncio.timeout(TIMEOUT_S):
            *_, last = [batch async for batch in self._call]
        return last.summary


async def deliver(client: ControlClient, *items: tpb.Delivery) -> tpb.DeliverSummary:
    """On a stream of its own; returns when the target has taken them in."""
    async with DeliverClient(client) as stream:
        await stream.send(*items)
        return await stream.finish()


async def drafted(client: ControlClient, message: tpb.Verify, *items: tpb.Delivery) -> Any:
    """Start a lease, deliver under it and return its first reply: what comes before its lease is dropped."""
    future = client.start(message)
    await client.taken()
    await deliver(client, *items)
    return await asyncio.wait_for(future, TIMEOUT_S)


def advance(slot: int, base_len: int, ids: Sequence[int] = (), ticket: int | None = None) -> dpb.Advance:
    ticket = new_ticket() if ticket is None else ticket
    return dpb.Advance(slot=slot, base_len=base_len, committed_ids=ids, ticket=ticket)


def new_ticket() -> int:
    return next(_tickets)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, **options})


def open_slot(
    slot: int, prompt: Sequence[int], *, num_prompt: int | None = None, k: int = 0, **options: Any
) -> pb.OpenSlot:
    """Options are SamplingParams' fields, `speculation`, target_address, target_epoch, protocol and
    num_prompt_logprobs; greedy, 32 tokens, no EOS and no drafts by default. k: draft tokens of each step, waited for.
    """
    names = ("target_address", "target_epoch", "protocol", "num_prompt_logprobs")
    own: dict[str, Any] = {"protocol": PROTOCOL} | {name: options.pop(name) for name in names if name in options}
    speculation = options.pop("speculation", Speculation(num_draft_tokens=k, max_draft_tokens=k))
    num_prompt = len(prompt) if num_prompt is None else num_prompt
    params = sampling(**options).to_proto()
    return pb.OpenSlot(
        slot=slot,
        committed_ids=prompt,
        num_prompt_tokens=num_prompt,
        params=params,
        speculation=speculation.to_proto(),
        **own,
    )


def verify(
    slot: int, base_len: int, ids: Sequence[int] = (), ticket: int | None = None, *, num_steps: int = 1
) -> tpb.Verify:
    """A lease for at least `num_steps` tokens: one is answered once. With a ticket, drafts are on their way."""
    message = tpb.Verify(slot=slot, base_len=base_len, committed_ids=ids, lease_end_len=base_len + len(ids) + num_steps)
    message.tickets.add(ticket=new_ticket() if ticket is None else ticket, is_drafted=ticket is not None)
    return message


def delivery(
    client: ControlClient,
    ticket: int,
    root_len: int,
    ids: Sequence[int],
    log_probs: torch.Tensor | None = None,
    *,
    sparse: bool = False,
    path: Sequence[int] = (),
    parents: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    ends: Sequence[int] = (),
) -> tpb.Delivery:
    """A chain, or a tree by `parents` and `ranks`. log_probs: [number of parents, V] float32, what they were drawn
    from; None for guesses. path: ids on the way, delivered before; -1 in parents and ends is the last of them.
    """
    num, start = len(ids), len(path)
    parents = range(ROOT, num - 1) if parents is None else parents
    nodes = Delivery(
        ticket=ticket,
        root_len=root_len,
        ids=[*path, *ids],
        parents=[*range(ROOT, start - 1), *(start + parent for parent in parents)],
        ranks=[*[0] * start, *([0] * num if ranks is None else ranks)],
        kinds=[
            *[NodeKind.REFERENCE] * start,
            *[NodeKind.DETERMINISTIC if log_probs is None else NodeKind.SAMPLED] * num,
        ],
        rows=None if log_probs is None else encode_rows(log_probs, prefer_sparse=sparse),
        ends=[start + node for node in ends],
        vocab_size=0 if log_probs is None else log_probs.shape[1],
    )
    return write_delivery(nodes, client.epoch)


async def eventually(check: Callable[[pb.WorkerInfo], bool], client: ControlClient, timeout_s: float = 20.0) -> None:
    """Until GetInfo satisfies `check`."""
    deadline = time.monotonic() + timeout_s
    while not check(info := await client.info()):
        assert time.monotonic() < deadline, f"still {info}"
        await asyncio.sleep(0.02)


def idle(info: pb.WorkerInfo) -> bool:
    """Nothing is held."""
    return info.num_slots_in_use == 0 and info.num_kv_blocks_in_use == 0 and info.num_leases == 0


def parked(metrics: dict[str, float], fate: str) -> float:
    """Return how many delivered draft tokens ended so, up to now."""
    return metrics.get(f'spec_parked_tokens_total{{fate="{fate}"}}', 0.0)
