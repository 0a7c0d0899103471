"""The launcher's gRPC server: gateways join it, receive the membership, and send reports of their load."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.v1 import registry_pb2 as pb
from outrider.v1 import registry_pb2_grpc
from outrider.wire.errors import ConfigError, IncompatiblePair, InvalidRequest
from outrider.wire.peer_text import bound_strings
from outrider.wire.protocol import PROTOCOL, other_protocol
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import join_host_port
from outrider.wire.transport.rpc import CONTROL_BYTES
from outrider.wire.transport.serving import ServerThread
from outrider.wire.transport.tls import CertificateFolder, warn_of_open_port

log = get_logger(__name__)

_REPORT_LIFE_S = 10.0
"""Seconds for which a gateway's report is valid."""

Scale = Callable[[str, int | None], "concurrent.futures.Future[pb.ScaleReply]"]
"""Function that sets the size of a pool, on any thread. Arguments: the pool's name, and its new number of workers or
None to change nothing. It returns the future of a reply with the pool's size, or of an OutriderError."""


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """gRPC service from which gateways get the list of workers. Call its methods on the thread of the server's event
    loop, except `reports`, which any thread may call.
    """

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._membership = pb.WorkerList()
        self._changed = asyncio.Event()
        self._reports: dict[int, tuple[float, pb.GatewayReport]] = {}
        self._joined: set[asyncio.Task[Any]] = set()
        self._num_joins = 0
        self._is_stopping = False

    def reports(self) -> list[pb.GatewayReport]:
        """Return the last report of each gateway that has joined, without reports older than _REPORT_LIFE_S seconds."""
        oldest_s = time.monotonic() - _REPORT_LIFE_S
        reports = list[pb.GatewayReport]()
        for at_s, report in list(self._reports.values()):
            if at_s >= oldest_s:
                reports.append(report)
        return reports

    def send_membership(self, membership: pb.WorkerList) -> None:
        """Send a new list of workers to all gateways. Call it on the thread of the server's event loop."""
        self._membership = membership
        self._changed.set()  # wakes those that wait for this event; the next ones wait for another
        self._changed = asyncio.Event()

    async def Join(
        self, request_iterator: AsyncIterator[pb.GatewayReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WorkerList]:
        """Read a gateway's reports. Yield the present list of workers at once, and each later list when it changes."""
        self._num_joins += 1
        reading = asyncio.create_task(self._read(self._num_joins, request_iterator))
        self._joined.add(reading)
        try:
            async for membership in self._memberships(reading):
                yield membership
            if self._is_stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the launcher is stopping; join again")
            reading.result()  # raises the error that ended the reading
        finally:
            self._joined.discard(reading)
            reading.cancel()

    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ScaleReply:
        """Set the size of the pool that the request names, if the request has a size. Return the pools' sizes after the
        change.
        """
        count = None
        if request.HasField("num_workers"):
            count = request.num_workers
        return await asyncio.wrap_future(self._scale(request.pool, count))

    async def end_all(self) -> None:
        """End the calls of all gateways. Each gateway then calls the registry of another launcher of the system, if
        there is one.
        """
        self._is_stopping = True
        for reading in list(self._joined):
            reading.cancel()

    async def _memberships(self, reading: asyncio.Task[None]) -> AsyncIterator[pb.WorkerList]:
        while not reading.done():
            changed = self._changed
            membership = self._membership
            if membership.version:
                yield membership
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait({waiting, reading}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def _read(self, join: int, reports: AsyncIterator[pb.GatewayReport]) -> None:
        name = ""
        try:
            async for report in reports:
                bound_strings(report)
                if join not in self._reports:
                    name = report.gateway or "without a name"
                    _check_protocol(name, report)
                    log.info("gateway %s joined", name)
                self._reports[join] = (time.monotonic(), report)
        except grpc.aio.AioRpcError as error:
            log.info("the stream of gateway %s broke: %s", name, error.code().name)
        except InvalidRequest as error:  # bytes that are no report; the call ends with it
            log.info("the stream of gateway %s broke: %s", name, error.message)
        finally:
            if self._reports.pop(join, None) is not None:
                log.info("gateway %s left", name)


def _check_protocol(name: str, report: pb.GatewayReport) -> None:
    refusal = other_protocol(f"the gateway {name}", report.protocol, "this registry")
    if refusal is not None:
        raise IncompatiblePair(refusal)


class Registry:
    """Server with the registry's service, on a thread of its own. That thread's event loop is the only one of the
    process that runs gRPC.
    """

    def __init__(self, scale: Scale) -> None:
        self._server = ServerThread()
        self._servicer: RegistryServicer | None = None
        self._scale = scale
        self.address = ""
        """Address host:port at which the server listens; empty before `start`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the server's thread."""
        return self._server.loop

    def start(self, address: str, certificates: CertificateFolder | None) -> str:
        """Start to listen, and return the host:port. Raises ConfigError if the server cannot listen there.

        address: value of the setting ray.registry. certificates: the launcher's certificates; None without TLS.
        """

        def add_services(server: grpc.aio.Server) -> list[str]:
            self._servicer = RegistryServicer(self._scale)
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(self._servicer, server)
            return [pb.DESCRIPTOR.services_by_name["RegistryService"].full_name]

        host, port = split_host_port(address)
        if certificates is None:
            warn_of_open_port(host)
        try:
            self.address = self._server.start(add_services, host, port, CONTROL_BYTES, certificates)
        except ConfigError as error:
            raise ConfigError(f"ray.registry is {address!r}: {error.message}", param="registry") from None
        return self.address

    def send_membership(self, membership: pb.WorkerList) -> None:
        """Send a new list of workers to all gateways. May be called on any thread."""
        assert self._servicer is not None
        message = pb.WorkerList(protocol=PROTOCOL)
        message.MergeFrom(membership)
        self._server.post([lambda: self._servicer.send_membership(message)])  # type: ignore[union-attr]

    def reports(self) -> list[pb.GatewayReport]:
        """Return each gateway's last report, if at most _REPORT_LIFE_S seconds old. May be called on any thread."""
        if self._servicer is None:
            return []
        return self._servicer.reports()

    def stop(self) -> None:
        """End all calls and the server."""
        if self._servicer is not None:
            self._server.stop(0.5, self._servicer.end_all)


def split_host_port(address: str) -> tuple[str, int]:
    """Split an address into host and port: "[::1]:7000" gives ("::1", 7000). Raises ConfigError for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"ray.registry is {address!r}, must be host:port, such as 0.0.0.0:7000", param="registry")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reachable(address: str) -> str:
    """Return the host:port at which a client on this machine reaches a server that listens at `address`: for
    "0.0.0.0:7000" it is "127.0.0.1:7000".
    """
    host, port = split_host_port(address)
    return join_host_port({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
