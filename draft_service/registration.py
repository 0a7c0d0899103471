"""Registers a draft's head at one target, on the stream to it, before rows of features are requested there.

On the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from draft_service.jobs import RowsRequest
from outrider.engine.heads.opening import OpeningMap, digest_of
from outrider.v1 import target_pb2 as tpb
from outrider.wire.log import get_logger
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.transport.streams import Outbox

log = get_logger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes of a piece of the opening map, behind which deliveries wait."""
MAX_PIECES_QUEUED = 4
"""Pieces that wait to be written."""
OFFER_AGAIN_S = 5.0
"""Seconds after which a head that was refused is offered again."""


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """A head as a draft registers it."""

    data: bytes
    """Its opening map, serialised."""
    digest: bytes
    width: int
    """Numbers in a row."""

    @classmethod
    def of(cls, opening: OpeningMap) -> HeadOffer:
        data = opening.to_bytes()
        return cls(data, digest_of(data), opening.spec.width)


class Registration:
    """The state of one head on one stream."""

    def __init__(self, offer: HeadOffer, address: str, outbox: Outbox[tpb.Delivery | tpb.FeatureAsk]) -> None:
        self.offer = offer
        self._address = address
        self._outbox = outbox
        self.epoch: int | None = None
        """Epoch of the target that the head was offered to last."""
        self.refusal: str | None = None
        """Why that target does not take the head; None where it does, or has not answered."""
        self._settled = asyncio.Event()
        """Set once it has answered."""
        self._sending: asyncio.Task[None] | None = None
        self._offered_s = 0.0

    async def register(self, target_epoch: int) -> None:
        """Register at a target, also where it refused the head before, and wait for its answer."""
        self._begin(target_epoch, again=True)
        while not self._settled.is_set():
            await self._settled.wait()

    def _begin(self, target_epoch: int, *, again: bool) -> None:
        """Offer the head to a target unless that was done. again: also where it was refused."""
        if target_epoch == self.epoch and not (again and self.refusal is not None):
            return
        self.epoch, self.refusal = target_epoch, None
        self._settled.clear()
        self._offered_s = time.monotonic()
        offer = self.offer
        spec = tpb.HeadSpec(target_epoch=target_epoch, digest=offer.digest, num_bytes=len(offer.data))
        self._outbox.put(tpb.FeatureAsk(head=spec))

    def request(self, target_epoch: int, request: RowsRequest) -> None:
        """Request rows of a lease where the head is ready; else nothing is sent, and the slot requests them again.

        A head that was refused is offered again now and then: the target may have had no memory for it.
        """
        self._begin(target_epoch, again=time.monotonic() >= self._offered_s + OFFER_AGAIN_S)
        if self._settled.is_set() and self.refusal is None:
            rows = tpb.FeatureRequest(
                target_epoch=target_epoch,
                ticket=request.ticket,
                digest=self.offer.digest,
                start=request.start,
                id=request.id,
            )
            self._outbox.put(tpb.FeatureAsk(rows=rows))

    def replied(self, reply: tpb.HeadReply) -> None:
        """Continue with a reply of the target; one to another life of it is dropped."""
        if reply.digest != self.offer.digest or reply.target_epoch != self.epoch:
            return
        self._stop_sending()
        if reply.state == tpb.HEAD_STATE_WEIGHTS_WANTED:
            self._sending = asyncio.create_task(self._send_weights())
        elif reply.state == tpb.HEAD_STATE_READY:
            log.info("the head is registered at %s", self._address)
            self.settle(None)
        elif reply.state == tpb.HEAD_STATE_REFUSED:
            why = bound_text(reply.why, MAX_REASON_BYTES) or "the target gave no reason"
            log.warning("%s refused the head: %s", self._address, why)
            self.settle(why)

    async def _send_weights(self) -> None:
        offer = self.offer
        for offset in range(0, len(offer.data), PIECE_BYTES):
            await self._outbox.wait_below(MAX_PIECES_QUEUED)
            data = offer.data[offset : offset + PIECE_BYTES]
            self._outbox.put(tpb.FeatureAsk(weights=tpb.HeadWeights(digest=offer.digest, offset=offset, data=data)))

    def settle(self, refusal: str | None) -> None:
        """Take the target's answer, or the end of its stream."""
        self._stop_sending()
        self.refusal = refusal
        self._settled.set()

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
