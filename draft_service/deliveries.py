"""Proposals on their way to targets: `Sender` decides what leaves when, `Deliverer` keeps a stream to each target.

The sender decides on the engine thread, where the laws have come from a device already; the gRPC loop, on which
messages are made, waits for nothing. What cannot be delivered is dropped, and so is the newest part when a target reads
more slowly than the draft writes: the target's wait budget turns that round into a plain step.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import grpc.aio

from draft_service.active import Asked, Payload
from draft_service.jobs import PartOut
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.wire_tensors import encode_laws
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.log import get_logger
from outrider.wire.transport.codec import DenseRows, rows_to_proto
from outrider.wire.transport.roles import Role
from outrider.wire.transport.streams import Outbox
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

MAX_BACKLOG_BYTES = 256 << 20
"""Most bytes that may wait for one target; what is older is late already. Doubling it doubles what a slow target
holds."""
MAX_TARGETS = 256
"""Streams kept at once; the one that was longest without a proposal gives way. Doubling it doubles their
connections."""
SMALL_PAYLOAD_BYTES = 64 * 1024
"""Cut laws of up to this many bytes travel as one part; a wide cut of many tokens would pass the message limit."""


class Sender:
    """Decides when which part of a proposal leaves for its target."""

    def __init__(self, engine: EngineThread, deliver: Callable[[PartOut], None]) -> None:
        """`deliver` runs on the gRPC loop's thread."""
        self._engine = engine
        self._deliver = deliver

    def send_due(self, a: Asked) -> None:
        """Send whole laws row by row, so that the wire works while the draft does, and small payloads at the end."""
        if a.unsent and (a.topk is None or len(a.unsent) * a.topk * 8 > SMALL_PAYLOAD_BYTES):
            self._deliver_part(a)
        if a.done and (a.num_sent < len(a.draft_ids) or not a.draft_ids):
            self._deliver_part(a)

    def send_large(self, a: Asked) -> None:
        """Send, of a proposal that is there at once, what has grown too large for one part, before the rest."""
        if sum(law.scores.nbytes for law in a.unsent) > SMALL_PAYLOAD_BYTES:
            self._deliver_part(a)

    def send_tree(self, a: Asked) -> None:
        """Send a tree that is grown, for then it is known how many nodes it has. Wide laws go one by one, each with the
        tokens that were drawn from it.
        """
        if a.unsent and (a.topk is None or len(a.unsent) * a.topk * 8 > SMALL_PAYLOAD_BYTES):
            for _, siblings in groupby(a.parents):
                self._deliver_part(a, len(list(siblings)), 1)
        else:
            self._deliver_part(a)

    def _deliver_part(self, a: Asked, num_ids: int | None = None, num_laws: int | None = None) -> None:
        """Send the next tokens with their laws; all that there are without a number."""
        laws, a.unsent = a.unsent[:num_laws], [] if num_laws is None else a.unsent[num_laws:]
        end = len(a.draft_ids) if num_ids is None else a.num_sent + num_ids
        ids = tuple(a.draft_ids[a.num_sent : end])
        part = PartOut(
            address=a.deliver_to,
            ticket=a.job.ticket,
            target_epoch=a.target_epoch,
            committed_len=len(a.slot.committed),
            start=a.num_sent,
            draft_ids=ids,
            rows=None,
            num_draft_tokens=a.num_announced,
            parents=tuple(a.parents[a.num_sent : end]),
        )
        a.num_sent += len(ids)
        self._engine.answer(lambda: self._send(part, laws, a.topk is not None, a.payload))

    def _send(self, part: PartOut, laws: Sequence[RowLaw], prefer_sparse: bool, payload: Payload) -> None:
        """On the gRPC loop's thread."""
        if laws:
            rows = encode_laws(laws, prefer_sparse=prefer_sparse)
            part = replace(part, rows=rows)
            full = isinstance(rows, DenseRows)
            payload.encoding = "full" if full else "topk"
            payload.num_bytes += len(rows.data) if full else len(rows.ids) + len(rows.log_probs)
        payload.num_bytes += 4 * len(part.draft_ids)
        self._deliver(part)


class Deliverer:
    """Opens a stream at the first proposal for an address, and opens it anew after it breaks."""

    def __init__(
        self,
        vocab_size: int,
        max_message_bytes: int,
        dropped: Callable[[int], None],
        certificates: CertificateFolder | None = None,
    ) -> None:
        """`dropped(num_tokens)` is called for parts that the backlog has no room for."""
        self._vocab_size = vocab_size
        self._max_message_bytes = max_message_bytes
        self._dropped = dropped
        self._certificates = certificates
        self._links: OrderedDict[str, _Link] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()

    def send(self, part: PartOut) -> None:
        link = self._links.get(part.address)
        if link is None or link.broken:
            dialer = self._dialer(part.address) if link is None else link.dialer
            link = self._links[part.address] = _Link(part.address, self._max_message_bytes, dialer)
        self._links.move_to_end(part.address)
        if len(self._links) > MAX_TARGETS:
            self._leave_oldest()
        if not link.put(self._to_proto(part)):
            self._dropped(len(part.draft_ids))

    def _dialer(self, address: str) -> Dialer:
        return Dialer(address, Role.TARGET, self._max_message_bytes, self._certificates)

    def _leave_oldest(self) -> None:
        _, link = self._links.popitem(last=False)
        leaving = asyncio.create_task(link.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _to_proto(self, part: PartOut) -> tpb.Delivery:
        return tpb.Delivery(
            ticket=part.ticket,
            target_epoch=part.target_epoch,
            committed_len=part.committed_len,
            start=part.start,
            draft_ids=part.draft_ids,
            distributions=None if part.rows is None else rows_to_proto(part.rows, self._vocab_size),
            num_draft_tokens=part.num_draft_tokens,
            parents=part.parents,
        )

    async def close(self) -> None:
        links, self._links = list(self._links.values()), OrderedDict()
        for link in links:
            await link.close()
        await asyncio.gather(*self._leaving)


class _Link:
    def __init__(self, address: str, max_message_bytes: int, dialer: Dialer) -> None:
        self.broken = False
        self.dialer = dialer
        self._address = address
        self._call = target_pb2_grpc.TargetServiceStub(dialer.channel()).Deliver()
        self._backlog_bytes = 0
        self._outbox: Outbox[tpb.Delivery] = Outbox(
            self._write,
            self._call.cancel,
            max_message_bytes - (1 << 16),  # the rest is for the items' headers
            tpb.Delivery.ByteSize,
        )
        self._watch = asyncio.create_task(self._until_broken())

    def put(self, item: tpb.Delivery) -> bool:
        """False when it was dropped. A part alone goes whatever its size."""
        size = item.ByteSize()
        if self._backlog_bytes and self._backlog_bytes + size > MAX_BACKLOG_BYTES:
            return False
        self._backlog_bytes += size
        self._outbox.put(item)
        return True

    async def _write(self, items: list[tpb.Delivery]) -> None:
        await self._call.write(tpb.DeliveryBatch(items=items))
        self._backlog_bytes -= sum(item.ByteSize() for item in items)

    async def _until_broken(self) -> None:
        try:
            await self._call
            reason = "the target ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:  # by `close`, or by grpc when a write failed
            reason = "cancelled"
        if not self.broken:
            log.warning("delivery stream to %s ended: %s", self._address, reason)
        self.broken = True
        await self._outbox.close()

    async def close(self) -> None:
        self.broken = True
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._outbox.close()
        self._call.cancel()
        await self.dialer.close()
