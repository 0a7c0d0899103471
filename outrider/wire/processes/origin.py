"""Parsers for the `Origin` and `Host` headers of browsers, and for settings that list them. Used by the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"
"""Entry `*` of a setting that lists origins or host names. With it every origin or host is allowed."""
_HOST = r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::([0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST, re.ASCII | re.IGNORECASE)
_ORIGIN_HEADER = re.compile(rf"([a-z][a-z0-9+.-]*)://{_HOST}", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
"""Default port of each scheme, which browsers leave out of the headers."""


@dataclass(frozen=True, slots=True)
class OriginHost:
    """Host and port of a server, as an `Origin` or `Host` header names them."""

    name: str
    """Host name in lower case, or an IP address (IPv6 in brackets)."""
    port: int | None
    """Port of the server. None = the header names no port, which means the default port of the scheme."""

    @classmethod
    def parse(cls, text: str) -> OriginHost | None:
        """Parse the value of a `Host` header. Returns None for a text that is not a host, such as user@name."""
        found = _HOST_HEADER.fullmatch(text)
        if found is None:
            return None
        return _host(found[1], found[2])

    @property
    def is_address(self) -> bool:
        """Whether the host is an IP address. A host name could be made to lead to another machine by whoever controls
        its name server; an address could not.
        """
        return self._address is not None

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback address, or a name reserved for loopback addresses (RFC 6761)."""
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
    """Origin of a web page: scheme, host and port of the server that served it. If the scheme has a default port,
    `host.port` is never None.
    """

    scheme: str
    host: OriginHost

    @classmethod
    def parse(cls, text: str) -> Origin | None:
        """Parse the value of an `Origin` header. Returns None for a text that is not an origin, such as `null`, which
        browsers send for sandboxed frames and local files.
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
        """Return whether `host` served the pages of this origin. Requests of these pages to `host` are then
        same-origin.
        """
        default_port = _DEFAULT_PORTS.get(self.scheme)
        if default_port is None:  # a scheme of an extension or an application, which no server has
            return False
        if host.port is None:
            host = OriginHost(host.name, default_port)
        return self.host == host


def read_origins(text: str) -> frozenset[Origin] | None:
    """Parse a setting that lists origins, separated by commas. Returns None for `*`, which allows any origin.

    Raises ValueError naming the entry that is not an origin.
    """
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
    """Parse a setting that lists host names, separated by commas. Returns None for `*`, which allows any host.

    Raises ValueError naming the entry that is not a host name.
    """
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
