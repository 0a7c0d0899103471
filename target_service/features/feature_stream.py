"""The target's end of one draft's Deliver stream, but for deliveries: heads, subscriptions, and features.

Runs on the gRPC loop's thread, but for `has_room`, `send_features`, `count` and `_forget`, which the engine thread
calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.streams import MAX_UNREAD, Outbox
from target_service.features.features import FeatureJob, Features, FeatureSubscription
from target_service.features.heads import Heads

MAX_BACKLOG_BYTES = 64 << 20
"""Bytes of features that may wait for one draft; the rest is sent later, as far as it is kept."""
PART_BYTES = 4 << 20
"""Bytes of features in one message, about; a message holds up those behind it."""


class FeatureStream:
    """One draft's stream."""

    def __init__(
        self,
        peer: str,
        epoch: int,
        heads: Heads,
        engine: EngineThread,
        metrics: WorkerMetrics,
        write: Callable[[tpb.FeatureBatch], Awaitable[None]],
        end_stream: Callable[[], object],
    ) -> None:
        """peer: the draft's address, for metrics. epoch: the target's. end_stream: called when `write` fails."""
        self._peer = peer
        self._epoch = epoch
        self._heads = heads
        self._engine = engine
        self._metrics = metrics
        self._write_batch = write
        self._num_posted_bytes = 0
        """Of features. The engine thread alone counts them."""
        self._num_written_bytes = 0
        """Of these. The gRPC loop's thread alone counts them."""
        self._is_over = False
        self._outbox: Outbox[tpb.FeatureBatch] = Outbox(
            self._write, end_stream, PART_BYTES, lambda batch: batch.ByteSize()
        )

    # requests of the draft

    async def wait_read(self) -> None:
        """Wait while more than MAX_UNREAD messages wait for the draft: the caller takes nothing more meanwhile."""
        await self._outbox.wait_below(MAX_UNREAD)

    def ask(self, ask: tpb.FeatureAsk) -> None:
        """Take in what the draft asks for; refuse what breaks a rule."""
        kind = ask.WhichOneof("item")
        if kind is None:
            return
        request = getattr(ask, kind)
        try:
            if kind == "weights":
                self._heads.add_piece(self, request)
            elif request.target_epoch != self._epoch:
                raise InvalidRequest(f"it is for target epoch {request.target_epoch}, this is {self._epoch}")
            elif kind == "head":
                self._heads.register(self, request)
            else:
                self._subscribe(request)
        except InvalidRequest as error:
            self._put_head(request.digest, tpb.HEAD_STATE_REFUSED, error.message, request.target_epoch)

    def _subscribe(self, request: tpb.FeatureRequest) -> None:
        if not self._heads.is_ready(self, request.digest):
            raise InvalidRequest("rows were asked for of a head that is not ready; register it first")
        subscription = FeatureSubscription(self, request.digest, request.ticket, request.start, request.id)
        self._engine.submit(FeatureJob(lambda features: features.subscribe(subscription)))

    def reply(self, digest: bytes, state: tpb.HeadState, why: str = "") -> None:
        """Send the state of a head's registration."""
        self._put_head(digest, state, why, self._epoch)

    def _put_head(self, digest: bytes, state: tpb.HeadState, why: str, target_epoch: int) -> None:
        self._put(
            tpb.FeatureBatch(heads=[tpb.HeadReply(digest=digest, state=state, why=why, target_epoch=target_epoch)])
        )

    # messages to the draft

    @property
    def has_room(self) -> bool:
        """Whether fewer bytes of features wait to be written than may."""
        return self._num_posted_bytes - self._num_written_bytes < MAX_BACKLOG_BYTES

    def send_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None:
        """Send the features of consecutive positions from `start` on: [num_tokens, width] bfloat16."""
        self._num_posted_bytes += len(data)
        self._engine.answer(lambda: self._put_features(subscription, start, num_tokens, data))
        self.count("sent", num_tokens, len(data))

    def count(self, fate: str, num_tokens: int, num_bytes: int) -> None:
        """Count features that were sent, or dropped for want of room."""
        self._metrics.feature_rows.labels(peer=self._peer, fate=fate).inc(num_tokens)
        self._metrics.feature_bytes.labels(peer=self._peer, fate=fate).inc(num_bytes)

    def _put_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None:
        token_bytes = len(data) // num_tokens
        part_len = max(1, PART_BYTES // token_bytes)
        for first in range(0, num_tokens, part_len):
            part = data[first * token_bytes : (first + part_len) * token_bytes]
            rows = tpb.FeatureRows(
                ticket=subscription.ticket,
                target_epoch=self._epoch,
                start=start + first,
                num_rows=len(part) // token_bytes,
                data=part,
                request_id=subscription.request_id,
            )
            self._put(tpb.FeatureBatch(rows=[rows]))

    def _put(self, batch: tpb.FeatureBatch) -> None:
        """Queue a message, unless the draft has ended its side."""
        if not self._is_over:
            self._outbox.put(batch)

    async def _write(self, batches: Sequence[tpb.FeatureBatch]) -> None:
        """Write what is queued as one message."""
        merged = tpb.FeatureBatch()
        for batch in batches:
            merged.MergeFrom(batch)
        await self._write_batch(merged)
        self._num_written_bytes += sum(len(rows.data) for rows in merged.rows)

    async def finish(self, summary: tpb.DeliverSummary) -> None:
        """Write all queued messages, and the summary last."""
        self._put(tpb.FeatureBatch(summary=summary))
        self._is_over = True
        await self._outbox.wait_below(0)

    async def close(self) -> None:
        """Forget what the stream registered and subscribed to."""
        self._engine.submit(FeatureJob(self._forget))
        self._heads.gone(self)
        await self._outbox.close()

    def _forget(self, features: Features) -> None:
        """End the subscriptions, and the series of the link once nothing counts on them. Runs on the engine thread."""
        features.end_link(self)
        self._metrics.forget_link(self._peer)
