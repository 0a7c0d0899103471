"""Call GetInfo of each worker every second, for the fleet's own record of the workers' health.

Ray considers a machine alive for ten seconds and more after it has gone.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.wire.peer_text import Reasons, bound_strings, describe_excess
from outrider.wire.settings.cores import Role
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.roles import Role as Part
from outrider.wire.transport.rpc import CONTROL_BYTES, describe_failure
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

PERIOD_S = 1.0
"""Seconds between two GetInfo calls to a worker, and between two questions to Ray about the workers' actors."""
TIMEOUT_S = 3.0
"""Maximum time in seconds for a worker's reply."""
_REFUSED_BY_SERVER = ("Tls handshake failed", "Socket closed")
"""Texts in gRPC's errors that show that a living server closed the connection, above all one that refuses our
certificate. In other versions of gRPC they may differ: the connection then counts as broken."""
_STUBS: dict[str, Any] = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}


@dataclass(frozen=True, slots=True)
class Sighting:
    """Outcome of one GetInfo call to a worker."""

    member: str
    """Name of the worker that was called."""
    address: str
    """Address host:port that was called."""
    at_s: float
    """Monotonic time, in seconds, at which the call began."""
    info: pb.WorkerInfo | None
    """The worker's reply; None if there was none."""
    is_silent: bool = False
    """Whether the call timed out: the worker hangs, or its machine is gone. If it is False and `info` is None, the
    connection was refused or broken, or the server answered with an error."""
    refusal: str | None = None
    """Error with which the worker's server answered the call. None if the call succeeded or timed out, or if its
    connection was refused or broken."""


class WorkerCalls:
    """Calls each watched worker's GetInfo once a second, and collects the outcomes for `read_sightings`. `watch` and
    `forget` may be called on any thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        certificates: CertificateFolder | None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to call workers.

        loop: the process's gRPC loop. certificates: those of the launcher; None without TLS. notify: called on the loop
        when there is a new outcome to `read_sightings`.
        """
        self._loop = loop
        self._notify = notify
        self._certificates = certificates
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sightings: queue.SimpleQueue[Sighting] = queue.SimpleQueue()

    def watch(self, member: str, role: Role, address: str) -> None:
        """Start to call the worker `member` at this address. Calls to an earlier address of the worker end."""
        self._call(self._start, member, role, address)

    def forget(self, member: str) -> None:
        """Stop calling the worker `member`."""
        self._call(self._end, member)

    def read_sightings(self) -> list[Sighting]:
        """Return the outcomes of calls since the last `read_sightings`, the oldest first. Some may be of workers that
        are no longer watched.
        """
        outcomes: list[Sighting] = []
        while not self._sightings.empty():
            outcomes.append(self._sightings.get())
        return outcomes

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _start(self, member: str, role: Role, address: str) -> None:
        self._end(member)
        self._tasks[member] = self._loop.create_task(self._watch(member, role, address))

    def _end(self, member: str) -> None:
        task = self._tasks.pop(member, None)
        if task is not None:
            task.cancel()

    async def _watch(self, member: str, role: Role, address: str) -> None:
        dialer = Dialer(address, Part(role), CONTROL_BYTES, self._certificates)
        refusals = Reasons()  # bounds the lines of the log for one address
        try:
            while True:
                called_s = time.monotonic()
                sighting = await self._get_info(dialer, member, role, address, called_s)
                if sighting.refusal is not None and refusals.note(sighting.refusal):
                    log.warning("%s at %s refuses GetInfo: %s", member, address, sighting.refusal)
                self._sightings.put(sighting)
                self._notify()
                await asyncio.sleep(max(0.1, PERIOD_S - (time.monotonic() - called_s)))
        finally:
            await dialer.close()

    async def _get_info(self, dialer: Dialer, member: str, role: Role, address: str, at_s: float) -> Sighting:
        try:
            stub = _STUBS[role](dialer.channel())
            info = await stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)
            too_long = describe_excess(info)
            if too_long is not None:
                return Sighting(member, address, at_s, None, refusal=f"the {role} {too_long}")
            bound_strings(info)
            return Sighting(member, address, at_s, info)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Sighting(member, address, at_s, None, is_silent=True)
            return Sighting(member, address, at_s, None, refusal=_refusal(error))


def _refusal(error: grpc.aio.AioRpcError) -> str | None:
    """Return the error of a living server; None if the connection was refused, broken or given up as dead."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and not any(word in details for word in _REFUSED_BY_SERVER):
        return None
    return describe_failure(error)
