"""What a draft grew on its way to targets: a stream to each target. On the gRPC loop's thread.

What cannot be delivered is dropped, and so is the newest when a target reads more slowly than the draft writes: to the
target it is a guess that did not come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import grpc.aio

from outrider.engine.speculation.nodes import Nodes, to_proto
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.log import get_logger
from outrider.wire.transport.roles import Role
from outrider.wire.transport.streams import Outbox
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

MAX_BACKLOG_BYTES = 256 << 20
"""Most bytes that may wait for one target; what is older is late already. Doubling it doubles what a slow target
holds."""
MAX_TARGETS = 256
"""Streams kept at once; the one that was longest without a delivery gives way. Doubling it doubles their
connections."""


class Deliverer:
    """Opens a stream at the first delivery for an address, and opens it anew after it breaks."""

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

    def send(self, address: str, target_epoch: int, nodes: Nodes) -> None:
        link = self._links.get(address)
        if link is None or link.broken:
            dialer = self._dialer(address) if link is None else link.dialer
            link = self._links[address] = _Link(address, self._max_message_bytes, dialer)
        self._links.move_to_end(address)
        if len(self._links) > MAX_TARGETS:
            self._leave_oldest()
        if not link.put(to_proto(nodes, target_epoch, self._vocab_size)):
            self._dropped(len(nodes.ids))

    def _dialer(self, address: str) -> Dialer:
        return Dialer(address, Role.TARGET, self._max_message_bytes, self._certificates)

    def _leave_oldest(self) -> None:
        _, link = self._links.popitem(last=False)
        leaving = asyncio.create_task(link.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

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
