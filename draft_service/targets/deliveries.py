"""Deliveries and requests for features to targets, on one stream for each target. Runs on the gRPC loop's thread.

A delivery that cannot be sent is dropped; so is a new one while a target reads more slowly than the draft worker
writes. The target then verifies fewer draft tokens. If a stream ends, its requests for features are lost, and the slots
request them again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from draft_service.slot_jobs import FeaturesJob, FeaturesRequest
from draft_service.targets.registration import SerializedHead
from draft_service.targets.target_link import TargetLink
from outrider.engine.speculation.nodes import Delivery, write_delivery
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import Unavailable
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES
from outrider.wire.transport.tls import CertificateFolder, Dialer

MAX_TARGETS = 256
"""Maximum number of open streams from the draft worker to targets. Above it, the one longest without use is closed."""
REGISTER_S = 60.0
"""Maximum seconds that the registration of a head at a target may take, with the upload of its projection. It is less
than a gateway waits for a pairing check."""


class Deliverer:
    """Sends deliveries to targets over one stream for each address. It opens the stream when an address is first used,
    and another one at the next use after the stream broke.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        submit: Callable[[FeaturesJob], None],
        certificates: CertificateFolder | None = None,
        head: SerializedHead | None = None,
    ) -> None:
        """Create a deliverer. `submit`: function that passes received features to the engine thread. `certificates`:
        for TLS; None without it. `head`: the draft worker's head; None if it has none.
        """
        self._metrics = metrics
        self._certificates = certificates
        self._open = partial(TargetLink, head=head, metrics=metrics, submit=submit)
        self._links: OrderedDict[str, TargetLink] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def send(self, address: str, target_epoch: int, nodes: Delivery) -> None:
        """Queue a delivery for the target at `address`. If its queue would exceed MAX_BACKLOG_BYTES, the delivery is
        not queued, and its draft tokens are counted as dropped.
        """
        if not self._link(address).put(write_delivery(nodes, target_epoch)):
            self._metrics.dropped_tokens.inc(len(nodes.ids))

    def request_features(self, address: str, target_epoch: int, request: FeaturesRequest) -> None:
        """Ask a target for the features of a slot's tokens from a position on: those that it has, and later ones as it
        computes them. A second equal request has no further effect.
        """
        self._link(address).registration.request(target_epoch, request)

    async def register(self, address: str, target_epoch: int) -> None:
        """Register the draft worker's head at a target.

        Raises `IncompatiblePair` if the target refuses the head. Raises `Unavailable` if the target cannot be reached
        or does not answer in time. After either error, another call registers the head again.
        """
        registration = self._link(address).registration
        try:
            async with asyncio.timeout(REGISTER_S):
                await registration.register(target_epoch)
        except TimeoutError:
            error = Unavailable(f"the target at {address} did not take the head within {REGISTER_S:g} s")
            registration.settle(error)
            raise error from None

    def stub(self, address: str) -> target_pb2_grpc.TargetServiceStub:
        """Return a gRPC stub for calls to the target at `address`. It shares the channel of the stream to that
        target.
        """
        return self._link(address).stub

    def _link(self, address: str) -> TargetLink:
        link = self._links.get(address)
        if link is None:
            dialer = Dialer(address, Role.TARGET, MAX_MESSAGE_BYTES, self._certificates)
            link = self._links[address] = self._open(address, dialer)
        elif link.is_broken:
            link = self._links[address] = self._open(address, link.dialer)
        self._links.move_to_end(address)
        if len(self._links) > MAX_TARGETS:
            _, oldest = self._links.popitem(last=False)
            closing = asyncio.create_task(oldest.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return link

    async def close(self) -> None:
        """Close the streams to all targets."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))
