"""Connects to the launcher's registry: receives the membership, and reports the load of each pool once a second.

While the registry is away the last membership stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import grpc.aio
from prometheus_client import Gauge

from gateway.workers.membership import Membership, from_proto
from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import registry_pb2_grpc
from outrider.wire.errors import IncompatiblePair
from outrider.wire.protocol import PROTOCOL, other_protocol
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import describe_failure
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

REPORT_S = 1.0
"""Seconds between two reports to the launcher of the load of the pools."""
REJOIN_S = 0.5
"""Seconds between two attempts to join the registry."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximal size of a Membership message, in bytes."""


class RegistryClient:
    """A client that gets the gateway's membership from the launcher's registry, and joins again if the stream ends."""

    def __init__(
        self,
        address: str,
        certificates: CertificateFolder | None,
        report: Callable[[], rpb.GatewayReport],
        on_membership: Callable[[Membership], None],
        connected: Gauge,
    ) -> None:
        """Start to join the registry. Must be called on a running event loop.

        report: called once a second, returns the report that is sent. on_membership: called with each new membership.
        connected: gauge that is 1 while the client has joined, else 0.
        """
        self._address = address
        self._dialer = Dialer(address, Role.LAUNCHER, MAX_MESSAGE_BYTES, certificates)
        self._report = report
        self._on_membership = on_membership
        self._connected = connected
        connected.set(0)
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._first = asyncio.Event()
        self._version = (0, 0)
        """Epoch of the launcher and version of its last membership."""
        self._failure = ""
        """Error of the last attempt to join; empty while joined."""
        self._task = asyncio.create_task(self._keep_joined())

    async def wait_first(self, timeout_s: float) -> None:
        """Wait for the first membership, without a time limit.

        If it takes longer than `timeout_s` seconds, a warning is logged and the wait goes on. A launcher has no
        membership before its workers have loaded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        except TimeoutError:
            why = ""
            if self._failure:
                why = f" ({self._failure})"
            log.warning(
                "no workers from the registry at %s within %g s: is the launcher running there?%s Waiting on",
                self._address,
                timeout_s,
                why,
            )
            await self._first.wait()

    async def close(self) -> None:
        """Leave the registry, and close the channel to it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._dialer.close()

    async def _keep_joined(self) -> None:
        while True:
            try:
                await self._join()
            except grpc.aio.AioRpcError as error:
                self._warn_once(f"no answer from the registry at {self._address}: ", describe_failure(error))
            except IncompatiblePair as error:
                self._warn_once("", error.message)
            except Exception:  # whatever it was, the launcher may come back
                log.exception("the connection to the registry at %s failed", self._address)
            await asyncio.sleep(REJOIN_S)

    def _warn_once(self, prefix: str, failure: str) -> None:
        if failure != self._failure:
            log.warning("%s%s", prefix, failure)
        self._failure = failure

    async def _join(self) -> None:
        call = registry_pb2_grpc.RegistryServiceStub(self._dialer.channel()).Join()
        reporting = asyncio.create_task(self._keep_reporting(call))
        has_joined = False
        try:
            async for message in call:
                self._check_protocol(message)
                if not has_joined:
                    log.info("joined the registry at %s", self._address)
                has_joined = True
                self._failure = ""
                self._connected.set(1)
                self._apply(message)
        except asyncio.CancelledError:  # we leave it, not it us
            has_joined = False
            raise
        finally:
            self._connected.set(0)
            if has_joined:
                log.warning("lost the registry at %s; its last membership stays in force", self._address)
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            call.cancel()

    async def _keep_reporting(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                report = self._report()
                report.gateway = self._name
                report.protocol = PROTOCOL
                await call.write(report)
                await asyncio.sleep(REPORT_S)

    def _check_protocol(self, message: rpb.WorkerList) -> None:
        refusal = other_protocol(f"the registry at {self._address}", message.protocol, "this gateway")
        if refusal is not None:
            raise IncompatiblePair(refusal)

    def _apply(self, message: rpb.WorkerList) -> None:
        # A launcher without pools has just started and sees less than this gateway: its membership is ignored.
        epoch, version = self._version
        is_old = message.epoch == epoch and message.version <= version
        if not message.pools or is_old:
            return
        self._version = (message.epoch, message.version)
        self._on_membership(from_proto(message))
        self._first.set()
