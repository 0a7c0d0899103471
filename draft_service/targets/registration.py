"""Register a draft worker's head at one target, on the stream to it, before features are requested there.

Runs on the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from draft_service.slot_jobs import FeaturesRequest
from outrider.engine.heads.projection import Projection, digest_of
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, OutriderError, Unavailable
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.streams import Outbox

log = get_logger(__name__)

PIECE_BYTES = 4 << 20
"""Maximum bytes of the projection in one message of an upload. While a message is sent, deliveries wait."""
MAX_PIECES_QUEUED = 4
"""Number of queued messages on the stream above which an upload waits before it queues its next piece."""
REGISTER_AGAIN_S = 5.0
"""Seconds after which a head that the target has refused is registered there again, once a slot requests features."""


@dataclass(frozen=True, slots=True)
class SerializedHead:
    """Content of a head's registration at a target: the serialised projection, and its digest."""

    data: bytes
    """The head's projection, serialised."""
    digest: bytes
    """SHA-256 of `data`, the serialised projection. Draft workers and targets name the head by it."""
    width: int
    """Number of elements of one feature of the head."""

    @classmethod
    def of(cls, projection: Projection) -> SerializedHead:
        """Return the serialised projection of a head, with its digest."""
        data = projection.to_bytes()
        return cls(data, digest_of(data), projection.spec.width)


class Registration:
    """Registration of the draft worker's head over one stream to a target: it sends the head, and keeps the target's
    answer.
    """

    def __init__(self, head: SerializedHead, address: str, outbox: Outbox[tpb.Delivery | tpb.HeadRequest]) -> None:
        self.head = head
        self._address = address
        self._outbox = outbox
        self._epoch: int | None = None
        """Epoch of the target at which the head was last registered; None before the first registration."""
        self._answer = asyncio.Future[OutriderError | None]()
        """The target's answer: None if it accepts the head, or the error with which it refuses it."""
        self._registered_s = 0.0
        self._sending: asyncio.Task[None] | None = None

    async def register(self, target_epoch: int) -> None:
        """Register the head at the target, and wait for the target's answer. If the target refused the head before, it
        is registered again.

        Raises `IncompatiblePair` if the target refuses the head. Raises `Unavailable` if the stream ends, or if another
        call registers the head at another epoch of the target meanwhile.
        """
        error = await asyncio.shield(self._ensure_registered(target_epoch, 0.0))  # another caller may wait for it, too
        if error is not None:
            raise error

    def request(self, target_epoch: int, request: FeaturesRequest) -> None:
        """Request features from the target if the head is registered there. If it is not, only register the head; the
        slot requests its features again later.

        A head that the target has refused is registered again after `REGISTER_AGAIN_S` seconds, since the target may
        have had no memory for it.
        """
        answer = self._ensure_registered(target_epoch, REGISTER_AGAIN_S)
        if answer.done() and answer.result() is None:
            subscription = tpb.FeatureRequest(
                target_epoch=target_epoch,
                ticket=request.ticket,
                digest=self.head.digest,
                start=request.start,
                id=request.id,
            )
            self._outbox.put(tpb.HeadRequest(features=subscription))

    def _ensure_registered(self, target_epoch: int, again_s: float) -> asyncio.Future[OutriderError | None]:
        is_refused = self._answer.done() and self._answer.result() is not None
        if target_epoch != self._epoch or (is_refused and time.monotonic() >= self._registered_s + again_s):
            if not self._answer.done():
                why = f"the target at {self._address} was started anew"
                self._answer.set_result(Unavailable(why, retry_after_s=1.0))
            self._answer = asyncio.Future()
            self._epoch = target_epoch
            self._registered_s = time.monotonic()
            head = self.head
            spec = tpb.HeadSpec(target_epoch=target_epoch, digest=head.digest, num_bytes=len(head.data))
            self._outbox.put(tpb.HeadRequest(head=spec))
        return self._answer

    def handle_reply(self, reply: tpb.HeadReply) -> None:
        """Handle the target's reply to the registration: upload the projection, or record that the head is accepted or
        refused. Drop a reply for another head or another epoch.
        """
        if reply.digest != self.head.digest or reply.target_epoch != self._epoch:
            return
        if reply.state == tpb.HEAD_STATE_NEEDS_WEIGHTS:
            self._sending = asyncio.create_task(self._send_weights(self._answer))
        elif reply.state == tpb.HEAD_STATE_READY:
            log.info("the head is registered at %s", self._address)
            self.settle(None)
        elif reply.state == tpb.HEAD_STATE_REFUSED:
            why = bound_text(reply.reason, MAX_REASON_BYTES) or "the target gave no reason"
            log.warning("%s refused the head: %s", self._address, why)
            self.settle(IncompatiblePair(why))

    async def _send_weights(self, answer: asyncio.Future[OutriderError | None]) -> None:
        head = self.head
        for offset in range(0, len(head.data), PIECE_BYTES):
            await self._outbox.wait_below(MAX_PIECES_QUEUED)
            if answer.done():
                return
            data = head.data[offset : offset + PIECE_BYTES]
            self._outbox.put(tpb.HeadRequest(weights=tpb.HeadWeights(digest=head.digest, offset=offset, data=data)))

    def settle(self, error: OutriderError | None) -> None:
        """Record how the registration ended, in place of an earlier outcome.

        `error`: None if the target accepted the head; else the reason why the target refused it, or why no answer can
        come.
        """
        if self._answer.done():
            self._answer = asyncio.Future()
        self._answer.set_result(error)
