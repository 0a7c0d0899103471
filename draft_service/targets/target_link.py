"""A draft worker's stream to one target: it sends deliveries, and receives features for a head. Runs on the gRPC loop's
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import numpy as np

from draft_service.slot_jobs import FeaturesJob
from draft_service.targets.registration import Registration, SerializedHead
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import Unavailable
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES, describe_failure
from outrider.wire.transport.streams import Outbox
from outrider.wire.transport.tls import Dialer

log = get_logger(__name__)

MAX_BACKLOG_BYTES = 256 << 20
"""Maximum bytes of deliveries that wait to be sent to one target. Further deliveries are dropped."""
MAX_UNTAKEN_BYTES = 64 << 20
"""Maximum bytes of features that the stream has received and the slots have not stored yet. Above it, the stream is not
read."""
RETRY_S = 0.005
"""While the stream is not read, because MAX_UNTAKEN_BYTES is exceeded: seconds between two checks whether it may be
read again."""


class TargetLink:
    """Stream from a draft worker to one target. After the stream has ended, a new object replaces this one."""

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        head: SerializedHead | None,
        metrics: WorkerMetrics,
        submit: Callable[[FeaturesJob], None],
    ) -> None:
        """Open the stream.

        `address`: the target's. `dialer`: opens connections to it. `head`: the head to register before features are
        requested; None for a draft worker without a head. `submit`: function that passes received features to the
        engine thread.
        """
        self.is_broken = False
        """Whether the stream has ended."""
        self.dialer = dialer
        self._address = address
        self._metrics = metrics
        self._submit = submit
        self.stub = target_pb2_grpc.TargetServiceStub(dialer.channel())
        self._call = self.stub.Deliver()
        self._backlog_bytes = 0
        self._passed_bytes = 0
        """Total bytes of features passed to the engine. Only the gRPC loop's thread changes it."""
        self._stored_bytes = 0
        """Total bytes of features that the engine has taken. Only the engine thread changes it."""
        self._outbox: Outbox[tpb.Delivery | tpb.HeadRequest] = Outbox(
            self._write,
            self._call.cancel,
            MAX_MESSAGE_BYTES - (1 << 16),  # the rest is for the items' headers
            lambda item: item.ByteSize(),
        )
        self._registration: Registration | None = None
        if head is not None:
            self._registration = Registration(head, address, self._outbox)
        self._watch = asyncio.create_task(self._until_broken())

    @property
    def registration(self) -> Registration:
        """Registration that gives the target the projection of the draft worker's head. There must be a head."""
        assert self._registration is not None, "this draft has no head"
        return self._registration

    def put(self, item: tpb.Delivery) -> bool:
        """Queue a delivery, and return True. If the queue would exceed MAX_BACKLOG_BYTES, drop the delivery and return
        False. An empty queue accepts a delivery of any size.
        """
        size = item.ByteSize()
        if self._backlog_bytes and self._backlog_bytes + size > MAX_BACKLOG_BYTES:
            return False
        self._backlog_bytes += size
        self._outbox.put(item)
        return True

    async def _write(self, items: list[tpb.Delivery | tpb.HeadRequest]) -> None:
        batch = tpb.DeliveryBatch()
        for item in items:
            if isinstance(item, tpb.Delivery):
                batch.items.append(item)
            else:
                batch.head_requests.append(item)
        await self._call.write(batch)
        self._backlog_bytes -= sum(item.ByteSize() for item in batch.items)

    async def _until_broken(self) -> None:
        try:
            async for batch in self._call:
                await self._handle_features(batch)
            reason = "the target ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = describe_failure(error)
        except asyncio.CancelledError:  # by `close`, or by grpc when a write failed
            reason = "cancelled"
        if not self.is_broken:
            log.warning("delivery stream to %s ended: %s", self._address, reason)
        self.is_broken = True
        await self._outbox.close()
        if self._registration is not None:
            why = f"the target at {self._address} did not take the head: the stream to the target ended: {reason}"
            self._registration.settle(Unavailable(why))

    async def _handle_features(self, batch: tpb.FeatureBatch) -> None:
        if self._registration is None:
            return
        for head in batch.head_replies:
            self._registration.handle_reply(head)
        for chunk in batch.chunks:
            await self._handle_rows(chunk, self._registration.head.width)

    async def _handle_rows(self, message: tpb.FeatureChunk, width: int) -> None:
        num_bytes = len(message.data)
        if not num_bytes or num_bytes != 2 * width * message.num_tokens:
            log.warning("%d bytes for %d features came from %s", num_bytes, message.num_tokens, self._address)
            return
        rows = np.frombuffer(message.data, dtype=np.uint16).reshape(message.num_tokens, width)
        self._metrics.feature_rows.labels(peer=self._address, fate="received").inc(len(rows))
        self._metrics.feature_bytes.labels(peer=self._address, fate="received").inc(num_bytes)
        self._passed_bytes += num_bytes

        def taken() -> None:
            self._stored_bytes += num_bytes

        self._submit(FeaturesJob(message.ticket, message.target_epoch, message.start, rows, taken, message.request_id))
        while self._passed_bytes - self._stored_bytes > MAX_UNTAKEN_BYTES:  # noqa: ASYNC110  # of another thread
            await asyncio.sleep(RETRY_S)  # the target bounds what it cannot send

    async def close(self) -> None:
        """End the stream for good, and remove the stream's series from the metrics."""
        self.is_broken = True
        self._watch.cancel()
        await asyncio.gather(self._watch, self._outbox.close(), return_exceptions=True)
        await self.dialer.close()
        self._metrics.forget_link(self._address)
