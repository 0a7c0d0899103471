"""Register a draft's head at one target, on the stream to it, before features are requested there.

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
"""Bytes in one message of an uploaded projection. It is bounded because deliveries wait behind it."""
MAX_PIECES_QUEUED = 4
"""Maximum number of messages in the stream's queue at which the next piece of an upload is added."""
OFFER_AGAIN_S = 5.0
"""Seconds after which a refused head is offered again, when features are requested."""


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """Head of a draft as it is offered to targets: its projection, serialised."""

    data: bytes
    """Bytes of the projection."""
    digest: bytes
    """SHA-256 of the bytes, by which workers name the head."""
    width: int
    """Number of elements of a feature."""

    @classmethod
    def of(cls, projection: Projection) -> HeadOffer:
        """Return the offer of a head. `projection`: the head's projection."""
        data = projection.to_bytes()
        return cls(data, digest_of(data), projection.spec.width)


class Registration:
    """Registration of one head on one stream to a target: the last offer, and the target's answer to it."""

    def __init__(self, offer: HeadOffer, address: str, outbox: Outbox[tpb.Delivery | tpb.HeadRequest]) -> None:
        self.offer = offer
        self._address = address
        self._outbox = outbox
        self._epoch: int | None = None
        """Epoch of the target to which the head was last offered; None before the first offer."""
        self._answer = asyncio.Future[OutriderError | None]()
        """The target's answer: None if it accepts the head, or the error with which it refuses it."""
        self._offered_s = 0.0
        self._sending: asyncio.Task[None] | None = None

    async def register(self, target_epoch: int) -> None:
        """Register the head at the target, and wait for the answer. A head that was refused before is offered again.

        Raises `IncompatiblePair` if the target refuses the head. Raises `Unavailable` if the stream ends, or if the
        head is offered to another epoch of the target meanwhile.
        """
        error = await asyncio.shield(self._offer(target_epoch, 0.0))  # another caller may wait for it, too
        if error is not None:
            raise error

    def request(self, target_epoch: int, request: FeaturesRequest) -> None:
        """Request a lease's features if the head is registered. If it is not, offer the head; the slot requests again
        later.

        A head that was refused is offered again after `OFFER_AGAIN_S` seconds, since the target may have had no memory
        for it.
        """
        answer = self._offer(target_epoch, OFFER_AGAIN_S)
        if answer.done() and answer.result() is None:
            subscription = tpb.FeatureRequest(
                target_epoch=target_epoch,
                ticket=request.ticket,
                digest=self.offer.digest,
                start=request.start,
                id=request.id,
            )
            self._outbox.put(tpb.HeadRequest(features=subscription))

    def _offer(self, target_epoch: int, again_s: float) -> asyncio.Future[OutriderError | None]:
        is_refused = self._answer.done() and self._answer.result() is not None
        if target_epoch != self._epoch or (is_refused and time.monotonic() >= self._offered_s + again_s):
            if not self._answer.done():
                why = f"the target at {self._address} was started anew"
                self._answer.set_result(Unavailable(why, retry_after_s=1.0))
            self._answer = asyncio.Future()
            self._epoch = target_epoch
            self._offered_s = time.monotonic()
            offer = self.offer
            spec = tpb.HeadSpec(target_epoch=target_epoch, digest=offer.digest, num_bytes=len(offer.data))
            self._outbox.put(tpb.HeadRequest(head=spec))
        return self._answer

    def handle_reply(self, reply: tpb.HeadReply) -> None:
        """Handle a reply of the target to the offer: upload the projection, or record the answer. A reply for another
        epoch is dropped.
        """
        if reply.digest != self.offer.digest or reply.target_epoch != self._epoch:
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
        offer = self.offer
        for offset in range(0, len(offer.data), PIECE_BYTES):
            await self._outbox.wait_below(MAX_PIECES_QUEUED)
            if answer.done():
                return
            data = offer.data[offset : offset + PIECE_BYTES]
            self._outbox.put(tpb.HeadRequest(weights=tpb.HeadWeights(digest=offer.digest, offset=offset, data=data)))

    def settle(self, error: OutriderError | None) -> None:
        """Record the target's answer: None for acceptance, or the error because of which there will be none. A later
        call replaces it.
        """
        if self._answer.done():
            self._answer = asyncio.Future()
        self._answer.set_result(error)
