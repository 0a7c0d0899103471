"""Deliveries to targets, and requests to them: a stream to each. On the gRPC loop's thread.

What cannot be delivered is dropped, and so is the newest when a target reads more slowly than the draft writes: to the
target it is a draft token that did not come. Rows requested on a stream that ended are requested again by their slot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from draft_service.jobs import RowsJob, RowsRequest
from draft_service.registration import HeadOffer
from draft_service.target_link import TargetLink
from outrider.engine.speculation.nodes import Delivery, to_proto
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import IncompatiblePair, Unavailable
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CertificateFolder, Dialer

MAX_TARGETS = 256
"""Streams kept at once; the one that was longest without a delivery gives way."""
PAIR_S = 60.0
"""Seconds that a registration may take, weights included."""


class Deliverer:
    """Opens a stream at the first delivery for an address, and opens it anew after it breaks."""

    def __init__(
        self,
        max_message_bytes: int,
        dropped: Callable[[int], None],
        certificates: CertificateFolder | None = None,
        offer: HeadOffer | None = None,
        submit: Callable[[str, RowsJob], None] = lambda address, job: None,
        left: Callable[[str], None] = lambda address: None,
    ) -> None:
        """`dropped(num_tokens)` is called for deliveries that the backlog has no room for. offer: the draft's head,
        where it reads rows of features; `submit` takes those that come from an address. `left(address)` is called when
        nothing more comes from there.
        """
        self._max_message_bytes = max_message_bytes
        self._dropped = dropped
        self._certificates = certificates
        self._offer = offer
        self._submit = submit
        self._left = left
        self._links: OrderedDict[str, TargetLink] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()

    def send(self, address: str, target_epoch: int, nodes: Delivery) -> None:
        if not self._link(address).put(to_proto(nodes, target_epoch)):
            self._dropped(len(nodes.ids))

    def request_rows(self, address: str, target_epoch: int, request: RowsRequest) -> None:
        """Request the rows of a lease from a position on, as they are made. Requesting twice is harmless."""
        self._link(address).registration.request(target_epoch, request)

    async def register(self, address: str, target_epoch: int) -> None:
        """Register the head at a target. Raises IncompatiblePair where it refuses the head, and Unavailable where it
        was not there, or not in time: it may be another time.
        """
        link = self._link(address)
        registration = link.registration
        try:
            async with asyncio.timeout(PAIR_S):
                await registration.register(target_epoch)
        except TimeoutError:
            raise Unavailable(f"the target at {address} did not take the head within {PAIR_S:g} s") from None
        if registration.epoch != target_epoch:
            raise Unavailable(f"the target at {address} was started anew", retry_after_s=1.0)
        if link.is_broken:
            raise Unavailable(f"the target at {address} did not take the head: {registration.refusal}")
        if registration.refusal is not None:
            raise IncompatiblePair(registration.refusal)

    def stub(self, address: str) -> target_pb2_grpc.TargetServiceStub:
        """Return a stub that calls a target over its stream's channel."""
        return self._link(address).stub

    def _link(self, address: str) -> TargetLink:
        link = self._links.get(address)
        if link is None:
            dialer = Dialer(address, Role.TARGET, self._max_message_bytes, self._certificates)
        else:
            dialer = link.dialer
        if link is None or link.is_broken:
            link = TargetLink(address, self._max_message_bytes, dialer, self._offer, self._submit)
            self._links[address] = link
        self._links.move_to_end(address)
        if len(self._links) > MAX_TARGETS:
            leaving = asyncio.create_task(self._leave(*self._links.popitem(last=False)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        return link

    async def _leave(self, address: str, link: TargetLink) -> None:
        await link.close()
        self._left(address)

    async def close(self) -> None:
        links, self._links = self._links, OrderedDict()
        for link in links.values():
            await link.close()
        await asyncio.gather(*self._leaving)
