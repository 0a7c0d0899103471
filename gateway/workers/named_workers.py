"""Finds the members behind DNS names.

Each address of `dns:///host:port` is a worker, as a headless Service of Kubernetes lists them. The gateway's other
source of members is the launcher's registry. A command line without names never changes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.workers.membership import DNS, Membership, MemberSpec
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import join_host_port

log = get_logger(__name__)

LOOK_S = 1.0
"""Seconds between two look-ups."""
_NONE_THERE = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Errors that mean that a name has no address now. Any other error is the name server's and says nothing of the
workers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Function from a host to its IP addresses. Raises OSError."""


async def resolve(host: str) -> list[str]:
    """Return the addresses of a name, of the family that the system puts first: a worker may have one of each family.

    Raises OSError.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    first = found[0][0]
    return sorted({str(address[0]) for family, *_, address in found if family == first})


class NamedWorkers:
    """The members of a command line, updated whenever the addresses of a name change.

    A worker that its name no longer lists stays while its stream is up: a draining worker is no longer listed but
    finishes what it runs. A name without addresses counts as a member that is being started, so that its pool counts as
    missing.
    """

    def __init__(
        self,
        listed: Membership,
        heard: Callable[[Membership], None],
        is_connected: Callable[[str], bool],
        resolve: Resolve = resolve,
    ) -> None:
        """Create the members.

        heard: called with each membership. is_connected: whether a member's stream is up, by name.
        """
        self._listed = listed
        self._heard = heard
        self._is_connected = is_connected
        self._resolve = resolve
        self._found: dict[str, list[MemberSpec]] = {}
        """Members found, by the name of the entry that lists them."""
        self._told: Membership | None = None
        self._failures: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def wait_first(self, _timeout_s: float) -> None:
        """Report the members once, then keep looking up the names.

        Each name has its own task, so that one that times out delays no other.
        """
        await self.look()
        self._tasks = [
            asyncio.create_task(self._keep_looking(spec))
            for spec in self._listed.members
            if spec.address.startswith(DNS)
        ]

    async def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look(self) -> None:
        """Look up every name once, and report a change."""
        await asyncio.gather(*map(self._look_up, self._listed.members))
        self._tell()

    def _tell(self) -> None:
        members = [member for spec in self._listed.members for member in self._found[spec.name]]
        membership = Membership(self._listed.pools, tuple(members))
        if membership != self._told:
            self._heard(membership)
            self._told = membership

    async def _keep_looking(self, spec: MemberSpec) -> None:
        failure = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_up(spec)
                self._tell()
                failure = ""
            except Exception as error:  # whatever it was, the workers come and go on
                if failure != repr(error):
                    log.exception("the workers of %s cannot be followed", spec.address)
                failure = repr(error)

    async def _look_up(self, spec: MemberSpec) -> None:
        if not spec.address.startswith(DNS):
            self._found[spec.name] = [spec]
            return
        before = self._found.get(spec.name, [])
        host, _, port = spec.address.removeprefix(DNS).rpartition(":")
        addresses = await self._addresses(host.strip("[]"))
        awaited = replace(spec, name=f"{spec.pool}-{host}:{port}", address="", deliver_address="", starting=True)
        if addresses is None:
            self._found[spec.name] = before or [awaited]
            return
        found = [_member(spec, ip, int(port)) for ip in addresses]
        found += [left for left in before if left not in found and self._is_connected(left.name)]
        self._found[spec.name] = found or [awaited]

    async def _addresses(self, host: str) -> list[str] | None:
        """Returns None if the look-up failed. Each reason is logged once."""
        try:
            addresses = await self._resolve(host)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno in _NONE_THERE:
                return []
            if self._failures.get(host) != str(error):
                log.warning("%s cannot be looked up: %s; the workers that it had stay in force", host, error)
            self._failures[host] = str(error)
            return None
        self._failures.pop(host, None)
        return addresses


def _member(spec: MemberSpec, ip: str, port: int) -> MemberSpec:
    address = join_host_port(ip, port)
    deliver_to = address if spec.role == "target" else ""
    return replace(spec, name=f"{spec.pool}-{address}", address=address, deliver_address=deliver_to)
