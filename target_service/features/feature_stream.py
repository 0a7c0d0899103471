"""The target's end of one draft worker's Deliver stream, except for its deliveries: head registration, subscriptions,
and features.

Called by the servicer on the gRPC loop's thread; `has_capacity`, `send_features`, `count` and `_forget` run on the
engine thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.streams import MAX_UNREAD, Outbox
from target_service.features.features import FeatureJob, Features, FeatureSubscription
from target_service.features.registered_heads import Heads

MAX_BACKLOG_BYTES = 64 << 20
"""Maximum bytes of features that wait to be written to one draft worker. Further features are not queued; they are sent
later, as far as the target still keeps them."""
PIECE_BYTES = 4 << 20
"""Approximate maximum bytes of features in one message. It is bounded because other messages to the draft worker wait
until it is written."""


class FeatureStream:
    """Stream from the target to one draft worker. It carries features, and the replies to the draft worker's
    registration of its head.
    """

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
        """Create the stream. peer: the draft worker's address, a label of metrics. epoch: the target's. write: function
        that sends one message. end_stream: called if `write` fails.
        """
        self._peer = peer
        self._epoch = epoch
        self._heads = heads
        self._engine = engine
        self._metrics = metrics
        self._write_batch = write
        self._num_posted_bytes = 0
        """Total bytes of features that were queued to be written. Only the engine thread changes it."""
        self._num_written_bytes = 0
        """Total bytes of features that were written. Only the gRPC loop's thread changes it."""
        self._is_over = False
        self._outbox: Outbox[tpb.FeatureBatch] = Outbox(
            self._write, end_stream, PIECE_BYTES, lambda batch: batch.ByteSize()
        )

    # requests of the draft

    async def wait_read(self) -> None:
        """Wait while more than MAX_UNREAD messages to the draft worker wait to be written. Call it before reading the
        draft worker's next message.
        """
        await self._outbox.wait_below(MAX_UNREAD)

    def handle(self, ask: tpb.HeadRequest) -> None:
        """Handle one request of the draft worker: to register a head, to add a piece of the head's weights, or to
        subscribe to features. A request that breaks a rule is answered with a refusal.
        """
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
        """Send the draft worker the state of its head's registration.

        digest: digest of the head. state: ready, refused, or needs weights. why: reason of a refusal.
        """
        self._put_head(digest, state, why, self._epoch)

    def _put_head(self, digest: bytes, state: tpb.HeadState, why: str, target_epoch: int) -> None:
        self._put(
            tpb.FeatureBatch(
                head_replies=[tpb.HeadReply(digest=digest, state=state, reason=why, target_epoch=target_epoch)]
            )
        )

    # messages to the draft

    @property
    def has_capacity(self) -> bool:
        """Whether fewer than MAX_BACKLOG_BYTES of features wait to be written."""
        return self._num_posted_bytes - self._num_written_bytes < MAX_BACKLOG_BYTES

    def send_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None:
        """Send the features of num_tokens consecutive tokens, the first at position `start`.

        data: the features, [num_tokens, d] bfloat16, row by row.
        """
        self._num_posted_bytes += len(data)
        self._engine.answer(lambda: self._put_features(subscription, start, num_tokens, data))
        self.count("sent", num_tokens, len(data))

    def count(self, fate: str, num_tokens: int, num_bytes: int) -> None:
        """Count features in the metrics. fate: "sent" or "dropped". num_tokens: number of the features. num_bytes:
        their size.
        """
        self._metrics.feature_rows.labels(peer=self._peer, fate=fate).inc(num_tokens)
        self._metrics.feature_bytes.labels(peer=self._peer, fate=fate).inc(num_bytes)

    def _put_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None:
        feature_bytes = len(data) // num_tokens
        piece_len = max(1, PIECE_BYTES // feature_bytes)
        for first in range(0, num_tokens, piece_len):
            piece = data[first * feature_bytes : (first + piece_len) * feature_bytes]
            chunk = tpb.FeatureChunk(
                ticket=subscription.ticket,
                target_epoch=self._epoch,
                start=start + first,
                num_tokens=len(piece) // feature_bytes,
                data=piece,
                request_id=subscription.request_id,
            )
            self._put(tpb.FeatureBatch(chunks=[chunk]))

    def _put(self, batch: tpb.FeatureBatch) -> None:
        if not self._is_over:
            self._outbox.put(batch)

    async def _write(self, batches: Sequence[tpb.FeatureBatch]) -> None:
        merged = tpb.FeatureBatch()
        for batch in batches:
            merged.MergeFrom(batch)
        await self._write_batch(merged)
        self._num_written_bytes += sum(len(chunk.data) for chunk in merged.chunks)

    async def finish(self, summary: tpb.DeliverSummary) -> None:
        """Write all queued messages and then `summary`, the summary of the deliveries that the draft worker sent.
        Return when all is written.
        """
        self._put(tpb.FeatureBatch(summary=summary))
        self._is_over = True
        await self._outbox.wait_below(0)

    async def close(self) -> None:
        """End the stream, its subscriptions, and the registration of its head."""
        self._engine.submit(FeatureJob(self._forget))
        self._heads.remove_stream(self)
        await self._outbox.close()

    def _forget(self, features: Features) -> None:
        features.end_link(self)
        self._metrics.forget_link(self._peer)  # after the last feature is counted
