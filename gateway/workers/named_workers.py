"""Finds the members behind DNS names.

Each address of `dns:///host:port` is a worker, as a headless Service of Kubernetes lists them. The gateway's other
source of members is the launcher's registry. The members of a command line without DNS names never change.
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
"""Seconds between two look-ups of a DNS name."""
_NONE_THERE = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Errors of getaddrinfo for a name without an address now. Any other error is a fault of the name server and shows
nothing about the workers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Function that takes a host name and returns its IP addresses. Raises OSError."""


async def resolve(host: str) -> list[str]:
    """Return the IP addresses of a host name, sorted. Raises OSError.

    Only addresses of the family (IPv4 or IPv6) that the system lists first are returned: a worker that has one address
    of each would count twice.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    first_family = found[0][0]
    addresses = set[str]()
    for family, *_, address in found:
        if family == first_family:
            addresses.add(str(address[0]))
    return sorted(addresses)


class NamedWorkers:
    """The membership of a gateway whose command line lists its workers. It changes with the IP addresses of DNS names.

    A worker that its DNS name no longer lists stays a member while its stream is up: a draining worker is not listed,
    but finishes what it runs. A name without addresses counts as one worker that is being started, so that the gateway
    treats its pool as not ready.
    """

    def __init__(
        self,
        listed: Membership,
        on_membership: Callable[[Membership], None],
        is_connected: Callable[[str], bool],
        resolve: Resolve = resolve,
    ) -> None:
        """Create the members.

        listed: membership of the command line. on_membership: called with each membership that differs from the last.
        is_connected: returns whether the stream to the member of a name is up. resolve: function that looks up a host.
        """
        self._listed = listed
        self._on_membership = on_membership
        self._is_connected = is_connected
        self._resolve = resolve
        self._found: dict[str, list[MemberSpec]] = {}
        """Members found for each entry of the command line, by the entry's name."""
        self._reported: Membership | None = None
        self._failures: dict[str, str] = {}
        """Last error of looking up a host, by host. A host whose last look-up succeeded has no entry."""
        self._tasks: list[asyncio.Task[None]] = []

    async def wait_first(self, _timeout_s: float) -> None:
        """Look up all DNS names once, so that there is a membership; from then on, every LOOK_S seconds.

        Each name has its own task, so that a look-up that times out delays no other.
        """
        await self.look_up()
        for spec in self._listed.members:
            if spec.address.startswith(DNS):
                self._tasks.append(asyncio.create_task(self._keep_looking(spec)))

    async def close(self) -> None:
        """Stop looking up names."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look_up(self) -> None:
        """Look up every DNS name once, and pass the membership to `on_membership` if it has changed."""
        await asyncio.gather(*map(self._look_up, self._listed.members))
        self._report()

    def _report(self) -> None:
        members = list[MemberSpec]()
        for spec in self._listed.members:
            members += self._found[spec.name]
        membership = Membership(self._listed.pools, tuple(members))
        if membership != self._reported:
            self._on_membership(membership)
            self._reported = membership

    async def _keep_looking(self, spec: MemberSpec) -> None:
        failure = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_up(spec)
                self._report()
                failure = ""
            except Exception as error:  # whatever it was, the workers come and go on
                if failure != repr(error):
                    log.exception("the workers of %s cannot be followed", spec.address)
                failure = repr(error)

    async def _look_up(self, spec: MemberSpec) -> None:
        if not spec.address.startswith(DNS):
            self._found[spec.name] = [spec]
            return
        previous = self._found.get(spec.name, [])
        host, _, port = spec.address.removeprefix(DNS).rpartition(":")
        addresses = await self._addresses(host.strip("[]"))
        missing = replace(spec, name=f"{spec.pool}-{host}:{port}", address="", deliver_address="", is_starting=True)
        if addresses is None:
            self._found[spec.name] = previous or [missing]
            return
        members = [_member(spec, ip, int(port)) for ip in addresses]
        for member in previous:
            if member not in members and self._is_connected(member.name):
                members.append(member)  # it drains: its name no longer lists it
        self._found[spec.name] = members or [missing]

    async def _addresses(self, host: str) -> list[str] | None:
        # Returns None if the look-up failed. Each reason is logged once.
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
    deliver_address = ""
    if spec.role == "target":
        deliver_address = address
    return replace(spec, name=f"{spec.pool}-{address}", address=address, deliver_address=deliver_address)
