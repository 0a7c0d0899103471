"""Origins of web pages and hosts, as browsers write them in `Origin` and `Host`. For the gateway and its settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"
"""In place of a list of origins or hosts: all of them."""
_HOST = r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::([0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST, re.ASCII | re.IGNORECASE)
_ORIGIN_HEADER = re.compile(rf"([a-z][a-z0-9+.-]*)://{_HOST}", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
"""Ports by scheme that browsers leave out."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host by which a server is called: a name in lower case, or an address (IPv6 in brackets)."""

    name: str
    port: int | None
    """None where it is the scheme's own."""

    @classmethod
    def parse(cls, text: str) -> Host | None:
        """Return the host of a `Host` header; None if it is none, as with a user in front of an @."""
        found = _HOST_HEADER.fullmatch(text)
        return None if found is None else _host(found[1], found[2])

    @property
    def is_address(self) -> bool:
        """Whether it is an address, which no answer of a name server can lead elsewhere."""
        return self._address is not None

    @property
    def is_loopback(self) -> bool:
        """Whether it is a loopback address, or a name that browsers and resolvers keep for them (RFC 6761)."""
        if self._address is not None:
            return self._address.is_loopback
        return self.name == "localhost" or self.name.endswith(".localhost")

    @property
    def _address(self) -> IPv4Address | IPv6Address | None:
        try:
            return ip_address(self.name.strip("[]"))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Origin:
    """A page's origin. The port is never None where the scheme has one of its own."""

    scheme: str
    host: Host

    @classmethod
    def parse(cls, text: str) -> Origin | None:
        """Return the origin of an `Origin` header; None if it is none, as `null` is of a sandboxed frame or a file."""
        found = _ORIGIN_HEADER.fullmatch(text)
        if found is None:
            return None
        scheme, host = found[1].lower(), _host(found[2], found[3])
        return cls(scheme, host if host.port is not None else Host(host.name, _DEFAULT_PORTS.get(scheme)))

    def is_of(self, host: Host) -> bool:
        """Return whether a page of this origin came from `host`."""
        default = _DEFAULT_PORTS.get(self.scheme)
        if default is None:  # a scheme of an extension or an application, which no server has
            return False
        port = default if host.port is None else host.port
        return self.host == Host(host.name, port)


def read_origins(text: str) -> frozenset[Origin] | None:
    """Return the origins of a setting, with commas between them; None = any. Raises ValueError naming the wrong one."""
    origins = set()
    for part in _parts(text):
        if part == ANY:
            return None
        origin = Origin.parse(part)
        if origin is None:
            raise ValueError(f"{part!r} is no origin; write it as https://app.example or http://localhost:3000, or *")
        origins.add(origin)
    return frozenset(origins)


def read_host_names(text: str) -> frozenset[str] | None:
    """Return the names of a setting with commas between them; None for any. Raises ValueError naming the wrong one."""
    names = set()
    for part in _parts(text):
        if part == ANY:
            return None
        host = Host.parse(part)
        if host is None or host.port is not None:
            raise ValueError(f"{part!r} is no name of a host; write it as llm.example, without a port, or *")
        names.add(host.name)
    return frozenset(names)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _host(name: str, port: str | None) -> Host:
    return Host(name.lower(), None if port is None else int(port))
