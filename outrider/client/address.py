"""Where a gateway is, as people write it, and how the ports of its HTTP and its gRPC server are found from each other.

A gateway names its gRPC port in a header of /v1/models, whatever the answer, and its HTTP port in the answer to
GetModels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.transport.address import GRPC_PORT_HEADER, is_host_port, join_host_port

GRPC_PORT = 8001
"""A gateway's unless it is set."""
PROBE_TIMEOUT_S = 2.0
"""Seconds for a gateway to name its other port: it is on the way to an answer, or to an error."""
_OTHER_SCHEMES = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds|vsock):")
"""Beginnings of gRPC's own names, which it resolves itself."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address as somebody gave it."""

    target: str
    """host:port, or a name of gRPC's."""
    is_http: bool = False
    """Whether it is that of the HTTP server."""
    is_tls: bool = False
    """Whether it says itself that TLS is spoken."""
    is_grpcs_own: bool = False
    """Whether it is a name that gRPC alone resolves."""

    @property
    def host(self) -> str:
        return self.target.rpartition(":")[0].strip("[]")

    def with_port(self, port: int) -> str:
        """Return the same host with another port."""
        return join_host_port(self.host, port)


def read_address(text: str) -> Address:
    """Read host:port, a host alone, whose gRPC port is then 8001, a URL of the HTTP server, or a name of gRPC's.

    Raises ConfigError.
    """
    if _OTHER_SCHEMES.match(text):
        return Address(text, is_grpcs_own=True)
    scheme, has_scheme, rest = text.rpartition("://")
    if has_scheme and scheme not in ("http", "https"):
        raise ConfigError(f"address is {text!r}, must be host:port or http://host:port", param="address")
    if has_scheme:
        host_port = rest.partition("/")[0]
        default = 443 if scheme == "https" else 80
        return Address(_with_default(host_port, default, text), is_http=True, is_tls=scheme == "https")
    return Address(_with_default(text, GRPC_PORT, text))


def _with_default(text: str, port: int, written: str) -> str:
    """Return host:port; the port is added where there is none."""
    is_ipv6 = text.count(":") > 1 and not text.startswith("[")
    for candidate in (text, f"[{text}]:{port}" if is_ipv6 else f"{text}:{port}"):
        if is_host_port(candidate):
            return candidate
    raise ConfigError(f"address is {written!r}, must be host:port such as 127.0.0.1:8001", param="address")


async def find_grpc(address: Address, tls: bool) -> str | None:
    """Return host:port of the gRPC server of the gateway whose HTTP server is at `address`; None where that is none. A
    URL of a server that speaks no HTTP may be that of gRPC itself.

    Raises Unavailable where nobody answers.
    """
    import httpx  # takes longer to import than the rest of the SDK, and few calls need it

    url = f"{'https' if tls or address.is_tls else 'http'}://{address.target}/v1/models"
    try:
        # Only a port's number is read here: whom to trust is decided when gRPC connects to it.
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False) as http:
            reply = await http.head(url)
    except httpx.RemoteProtocolError:
        return address.target if address.is_http else None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"no gateway answers at {url} ({error}); start one with `outrider up`") from None
    port = reply.headers.get(GRPC_PORT_HEADER, "")
    return address.with_port(int(port)) if re.fullmatch(r"[0-9]{1,5}", port) else None
