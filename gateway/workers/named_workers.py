"""Members behind names: each address of `dns:///host:port` is a worker, as a headless Service of Kubernetes lists them.

The gateway's other source of members is the launcher's registry. A command line without names never changes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.workers.membership import DNS, Membership, MemberSpec
from outrider.wire.log import get_logger
from outrider.wire.transport.address import join_host_port

log = get_logger(__name__)

LOOK_S = 1.0
"""Seconds between two look-ups. Doubled, a worker that comes is used so much later."""
_NONE_THERE = (socket.EAI_NONAME, socket.EAI_NODATA)
"""A name has no address now. Any other failure is the name server's, and says nothing of the workers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""host -> its IP addresses. Raises OSError."""


async def resolve(host: str) -> list[str]:
    """Ask the system for the addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class NamedWorkers:
    """Passes on the members of a command line, again whenever the addresses of a name change.

    One that its name has lost stays for as long as its stream is up: a worker that drains is no longer listed, and
    finishes what runs there. A name without any is a member that is being started, so that its pool is missed.
    """

    def __init__(
        self,
        listed: Membership,
        heard: Callable[[Membership], None],
        is_connected: Callable[[str], bool],
        resolve: Resolve = resolve,
    ) -> None:
        """is_connected: of a member's name, whether its stream is up."""
        self._listed = listed
        self._heard = heard
        self._is_connected = is_connected
        self._resolve = resolve
        self._found: dict[str, dict[str, MemberSpec]] = {}
        """Members by their names, by that of the entry whose addresses they are."""
        self._told: Membership | None = None
        self._failures: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait_first(self, _timeout_s: float) -> None:
        """Pass the members on, and go on looking where there are names."""
        await self.look()
        if any(spec.address.startswith(DNS) for spec in self._listed.members):
            self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Look every name up once, and pass on what has changed."""
        members = [await self._members_of(spec) for spec in self._listed.members]
        membership = Membership(self._listed.pools, tuple(member for found in members for member in found))
        if membership != self._told:
            self._told = membership
            self._heard(membership)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def _members_of(self, spec: MemberSpec) -> list[MemberSpec]:
        if not spec.address.startswith(DNS):
            return [spec]
        before = self._found.get(spec.name, {})
        host, _, port = spec.address.removeprefix(DNS).rpartition(":")
        addresses = await self._addresses(host.strip("[]"))
        awaited = replace(spec, name=f"{spec.pool}-{host}", address="", deliver_address="", starting=True)
        if addresses is None:
            return list(before.values()) or [awaited]
        found = {member.name: member for ip in addresses for member in [_member(spec, ip, int(port))]}
        found |= {name: left for name, left in before.items() if name not in found and self._is_connected(name)}
        self._found[spec.name] = found
        return list(found.values()) or [awaited]

    async def _addresses(self, host: str) -> list[str] | None:
        """None where that cannot be told; each reason is logged once."""
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
    return replace(spec, name=f"{spec.pool}-{ip}", address=address, deliver_address=deliver_to)
