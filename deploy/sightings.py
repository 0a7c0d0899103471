"""Asks each worker for its facts every second, whatever Ray says of it: what the launcher itself sees.

Ray calls a machine alive for ten seconds and more after it has gone.
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
from outrider.wire.settings.pools import Role
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.roles import Role as Part
from outrider.wire.transport.rpc import CONTROL_BYTES, describe_failure
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

PERIOD_S = 1.0
"""Seconds between two questions to a worker, and between two looks at anything else that only Ray knows. Twice as long,
and a lost worker is noticed, and load acted upon, so much later."""
TIMEOUT_S = 3.0
"""Seconds that a worker has to answer. Twice as long, and silence is noticed so much later."""
_LIVING = ("Tls handshake failed", "Socket closed")
"""In what gRPC says of a connection that somebody there closed, a server that does not take our certificate above all.
Its words may change: without them it counts as a broken one."""
_STUBS: dict[str, Any] = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer of a worker, or that there was none."""

    member: str
    address: str
    """At which it was asked."""
    at_s: float
    """time.monotonic when it was asked: what it says is not older."""
    info: pb.WorkerInfo | None
    is_silent: bool = False
    """Nothing came back at all: it hangs, or its machine is gone. Otherwise the connection was refused or broken."""
    refusal: str | None = None
    """What a server that lives there said instead."""


class Sightings:
    """Watches workers. `watch` and `forget` may be called on any thread, `take` by the owner of the members."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        certificates: CertificateFolder | None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`loop`: the process's gRPC loop. notify: called on it when there is something to `take`."""
        self._loop = loop
        self._notify = notify
        self._certificates = certificates
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()

    def watch(self, member: str, role: Role, address: str) -> None:
        """Ask the worker at this address from now on, and at no other."""
        self._call(self._start, member, role, address)

    def forget(self, member: str) -> None:
        self._call(self._end, member)

    def take(self) -> list[Seen]:
        """Return what was seen since the last call, oldest first; something of before `forget` may be among it."""
        found: list[Seen] = []
        while not self._seen.empty():
            found.append(self._seen.get())
        return found

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
        refusals = Reasons()  # at most so many lines for one address, whatever it says in turn
        try:
            while True:
                began_s = time.monotonic()
                seen = await self._ask(dialer, member, role, address, began_s)
                if seen.refusal is not None and refusals.note(seen.refusal):
                    log.warning("%s at %s refuses to say what it is: %s", member, address, seen.refusal)
                self._seen.put(seen)
                self._notify()
                await asyncio.sleep(max(0.1, PERIOD_S - (time.monotonic() - began_s)))
        finally:
            await dialer.close()

    async def _ask(self, dialer: Dialer, member: str, role: Role, address: str, at_s: float) -> Seen:
        try:
            stub = _STUBS[role](dialer.channel())
            info = await stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)
            too_long = describe_excess(info)
            if too_long is not None:
                return Seen(member, address, at_s, None, refusal=f"the {role} {too_long}")
            bound_strings(info)
            return Seen(member, address, at_s, info)
        except grpc.aio.AioRpcError as error:
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            refusal = None if is_silent else _refusal(error)
            return Seen(member, address, at_s, None, is_silent, refusal)


def _refusal(error: grpc.aio.AioRpcError) -> str | None:
    """None when nobody may be there: the connection is refused or broken, or was given up as dead."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and not any(word in details for word in _LIVING):
        return None
    return describe_failure(error)
