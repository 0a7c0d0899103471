"""A draft's head at one target: registered on the stream to it, before rows of features are asked for there.

On the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from draft_service.jobs import RowsRequest
from outrider.engine.heads.opening import OpeningMap, digest_of
from outrider.v1 import target_pb2 as tpb
from outrider.wire.log import get_logger
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text

log = get_logger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes of a piece of the opening map. Doubling it halves their number; deliveries wait twice as long behind one."""
MAX_PIECES_QUEUED = 4
"""Pieces that wait to be written. Doubling it doubles what is copied ahead of a slow target."""
OFFER_AGAIN_S = 5.0
"""Seconds after which a head that was refused is offered again. Doubling it lets a draft be without rows as much longer
after a target had no memory for it."""
MAX_EARLY = 1024
"""Leases whose rows are asked for once the head is ready; the oldest is forgotten. Doubling it lets twice as many
wait."""


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """What a draft registers."""

    data: bytes
    """Its opening map as it is sent."""
    digest: bytes
    width: int
    """Numbers of a row."""

    @classmethod
    def of(cls, opening: OpeningMap) -> HeadOffer:
        data = opening.to_bytes()
        return cls(data, digest_of(data), opening.spec.width)


class Registration:
    """Of one head on one stream."""

    def __init__(
        self,
        offer: HeadOffer,
        address: str,
        ask: Callable[[tpb.FeatureAsk], None],
        wait_below: Callable[[int], Awaitable[None]],
    ) -> None:
        """ask: queues an ask on the stream. wait_below: waits until no more than so many are queued there."""
        self._offer = offer
        self._address = address
        self._ask = ask
        self._wait_below = wait_below
        self.epoch: int | None = None
        """Of the target that it was offered to last."""
        self._settled: asyncio.Future[str | None] | None = None
        """Why the head was refused for that epoch; None where it is ready."""
        self._early: dict[int, RowsRequest] = {}
        """By ticket."""
        self._sending: asyncio.Task[None] | None = None
        self._offered_s = 0.0

    def begin(self, target_epoch: int, *, again: bool = False) -> asyncio.Future[str | None]:
        """Register for a life of the target, unless that was done. Return what comes of it: why not, or None.

        again: register also where it was refused.
        """
        is_refused = self._settled is not None and self._settled.done() and self._settled.result() is not None
        if self._settled is None or target_epoch != self.epoch or (again and is_refused):
            self._settle("the target was started anew")
            self.epoch, self._settled = target_epoch, asyncio.get_running_loop().create_future()
            self._early.clear()
            offer = self._offer
            spec = tpb.HeadSpec(target_epoch=target_epoch, digest=offer.digest, num_bytes=len(offer.data))
            self._offered_s = time.monotonic()
            self._ask(tpb.FeatureAsk(head=spec))
        return self._settled

    def request(self, target_epoch: int, request: RowsRequest) -> None:
        """Ask for rows of a lease, now or once the head is ready. Where it was refused it is offered again, now and
        then: the target may have had no memory for it.
        """
        settled = self.begin(target_epoch, again=time.monotonic() >= self._offered_s + OFFER_AGAIN_S)
        if not settled.done():
            self._early.pop(request.ticket, None)
            self._early[request.ticket] = request
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]
        elif settled.result() is None:
            self._request(request)

    def _request(self, request: RowsRequest) -> None:
        assert self.epoch is not None, "nothing is registered"
        rows = tpb.FeatureRequest(
            target_epoch=self.epoch,
            ticket=request.ticket,
            digest=self._offer.digest,
            start=request.start,
            id=request.id,
        )
        self._ask(tpb.FeatureAsk(rows=rows))

    def replied(self, reply: tpb.HeadReply) -> None:
        """Go on with what the target said."""
        if reply.digest != self._offer.digest or reply.target_epoch != self.epoch:
            return  # of another life
        if reply.state == tpb.HEAD_STATE_WEIGHTS_WANTED:
            self._stop_sending()
            self._sending = asyncio.create_task(self._send_weights())
        elif reply.state == tpb.HEAD_STATE_READY:
            log.info("the head is registered at %s", self._address)
            self._settle(None)
            early, self._early = self._early, {}
            for request in early.values():
                self._request(request)
        elif reply.state == tpb.HEAD_STATE_REFUSED:
            self._stop_sending()
            why = bound_text(reply.why, MAX_REASON_BYTES) or "the target gave no reason"
            log.warning("%s refused the head: %s", self._address, why)
            self._settle(why)

    async def _send_weights(self) -> None:
        offer = self._offer
        for offset in range(0, len(offer.data), PIECE_BYTES):
            await self._wait_below(MAX_PIECES_QUEUED)
            data = offer.data[offset : offset + PIECE_BYTES]
            self._ask(tpb.FeatureAsk(weights=tpb.HeadWeights(digest=offer.digest, offset=offset, data=data)))

    def _settle(self, why: str | None) -> None:
        if self._settled is None or (self._settled.done() and self._settled.result() == why):
            return
        if self._settled.done():
            self._settled = asyncio.get_running_loop().create_future()
        self._settled.set_result(why)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def lost(self, why: str) -> None:
        """Note that the stream has ended."""
        self._stop_sending()
        self._settle(why)
