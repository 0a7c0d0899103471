"""Parsers for the `Origin` and `Host` headers of browsers, and for settings that list them. Used by the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"
"""A setting's value for all origins or hosts."""
_HOST = r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::([0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST, re.ASCII | re.IGNORECASE)
_ORIGIN_HEADER = re.compile(rf"([a-z][a-z0-9+.-]*)://{_HOST}", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
"""Ports that browsers leave out, by scheme."""


@dataclass(frozen=True, slots=True)
class OriginHost:
    """Host and port of a server."""

    name: str
    """A name in lower case, or an IP address (IPv6 in brackets)."""
    port: int | None
    """None for the scheme's default port."""

    @classmethod
    def parse(cls, text: str) -> OriginHost | None:
        """Parse a `Host` header. Returns None for what is no host, such as user@name."""
        found = _HOST_HEADER.fullmatch(text)
        if found is None:
            return None
        return _host(found[1], found[2])

    @property
    def is_address(self) -> bool:
        """Whether it is an IP address, which no reply of a name server can redirect."""
        return self._address is not None

    @property
    def is_loopback(self) -> bool:
        """Whether it is a loopback address, or a name reserved for loopback addresses (RFC 6761)."""
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
    """The origin of a web page. The host's port is not None for a scheme that has a default port."""

    scheme: str
    host: OriginHost

    @classmethod
    def parse(cls, text: str) -> Origin | None:
        """Parse an `Origin` header. Returns None for what is no origin, such as the `null` of a sandboxed frame or a
        file.
        """
        # "https://App.example": Origin("https", Host("app.example", 443))
        found = _ORIGIN_HEADER.fullmatch(text)
        if found is None:
            return None
        scheme = found[1].lower()
        host = _host(found[2], found[3])
        if host.port is None:
            host = OriginHost(host.name, _DEFAULT_PORTS.get(scheme))
        return cls(scheme, host)

    def is_of(self, host: OriginHost) -> bool:
        """Return whether a page of this origin came from `host`."""
        default_port = _DEFAULT_PORTS.get(self.scheme)
        if default_port is None:  # a scheme of an extension or an application, which no server has
            return False
        if host.port is None:
            host = OriginHost(host.name, default_port)
        return self.host == host


def read_origins(text: str) -> frozenset[Origin] | None:
    """Parse a setting of origins separated by commas; None = any (*). Raises ValueError naming the wrong one."""
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
    """Parse a setting of host names separated by commas; None = any (*). Raises ValueError naming the wrong one."""
    names = set()
    for part in _parts(text):
        if part == ANY:
            return None
        host = OriginHost.parse(part)
        if host is None or host.port is not None:
            raise ValueError(f"{part!r} is no name of a host; write it as llm.example, without a port, or *")
        names.add(host.name)
    return frozenset(names)


def _parts(text: str) -> list[str]:
    return list(filter(None, map(str.strip, text.split(","))))


def _host(name: str, port: str | None) -> OriginHost:
    if port is None:
        return OriginHost(name.lower(), None)
    return OriginHost(name.lower(), int(port))
