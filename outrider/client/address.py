"""Addresses of a gateway as people write them, and how its gRPC port is found where they name its HTTP server.

A gateway returns its gRPC port in a header of every reply to /v1/models, and its HTTP port in the reply to GetModels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.transport.address import GRPC_PORT_HEADER, is_host_port, join_host_port

GRPC_PORT = 8001
"""Default port of a gateway's gRPC server."""
PROBE_TIMEOUT_S = 2.0
"""Seconds to wait for the reply of a gateway's HTTP server to the request for its gRPC port."""
_HTTP_PORTS = {"http": 80, "https": 443}
"""Default port of each URL scheme."""
_GRPC_SCHEMES = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds|vsock):")
"""Beginnings of names that gRPC resolves itself."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a gateway that a user gave: host and port, and whether its HTTP or its gRPC server listens there."""

    target: str
    """host:port, or a name that gRPC resolves, such as dns:///gateway:8001."""
    is_http: bool = False
    """Whether the user gave a URL of the gateway's HTTP server. False = the address is taken as the gRPC server's."""
    is_tls: bool = False
    """Whether the URL begins with https, so that connections need TLS."""
    is_grpcs_own: bool = False
    """Whether `target` is a name that only gRPC can resolve, such as unix:/run/gateway. False = `target` is host:port,
    so that an HTTP server there can be asked for the gRPC port."""

    @property
    def host(self) -> str:
        """Host in `target`, an IPv6 address without its brackets."""
        return self.target.rpartition(":")[0].strip("[]")

    def with_port(self, port: int) -> str:
        """Return host:port with this address's host and the given port."""
        return join_host_port(self.host, port)


def read_address(text: str) -> Address:
    """Parse a gateway's address: host:port, a host alone (gRPC port 8001), a URL of its HTTP server, or a name that
    gRPC resolves.

    Raises ConfigError for any other text.
    """
    if _GRPC_SCHEMES.match(text):
        return Address(text, is_grpcs_own=True)
    scheme, separator, rest = text.rpartition("://")
    if not separator:
        return Address(_with_default_port(text, GRPC_PORT, text))
    if scheme not in _HTTP_PORTS:
        raise ConfigError(f"address is {text!r}, must be host:port or http://host:port", param="address")
    host_port = rest.partition("/")[0]
    target = _with_default_port(host_port, _HTTP_PORTS[scheme], text)
    return Address(target, is_http=True, is_tls=scheme == "https")


def _with_default_port(text: str, port: int, address: str) -> str:
    # "::1" and 8001: "[::1]:8001"
    is_ipv6 = text.count(":") > 1 and not text.startswith("[")
    host = f"[{text}]" if is_ipv6 else text
    for candidate in (text, f"{host}:{port}"):
        if is_host_port(candidate):
            return candidate
    raise ConfigError(f"address is {address!r}, must be host:port such as 127.0.0.1:8001", param="address")


async def find_grpc(address: Address, tls: bool) -> str | None:
    """Ask the HTTP server at `address` for the gateway's gRPC server. Return host:port of that; None = no HTTP
    server of a gateway is there.

    tls: send the request by https. If `address` is a URL and no HTTP is spoken there, its host:port is returned as that
    of the gRPC server. Raises Unavailable if nothing answers.
    """
    import httpx  # takes longer to import than the rest of the SDK, and few calls need it

    scheme = "https" if tls or address.is_tls else "http"
    url = f"{scheme}://{address.target}/v1/models"
    try:
        # The reply is used for a port's number alone: gRPC checks the certificate when it connects there.
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False) as http:
            reply = await http.head(url)
    except httpx.RemoteProtocolError:
        if address.is_http:
            return address.target
        return None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"no gateway answers at {url} ({error}); start one with `outrider up`") from None
    port = reply.headers.get(GRPC_PORT_HEADER, "")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        return None
    return address.with_port(int(port))
