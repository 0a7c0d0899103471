"""Write host:port as gRPC, browsers and people do, and say why nobody can listen there."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

from outrider.wire.errors import ConfigError

_HOST_PORT = re.compile(r"(\[[0-9a-f:.]+(%[\w.-]+)?\]|[\w.-]+):([0-9]{1,5})", re.ASCII | re.IGNORECASE)
_MOST_PORT = 2**16 - 1
GRPC_PORT_HEADER = "x-outrider-grpc-port"
"""Header of a gateway's answers to /v1/models: where its gRPC is, for clients that were given its HTTP port."""


def is_host_port(text: str) -> bool:
    """Whether text is host:port and nothing else: put into a URL it adds no user, path or query."""
    found = _HOST_PORT.fullmatch(text)
    return found is not None and int(found[3]) <= _MOST_PORT


def is_loopback(host: str) -> bool:
    """Whether host is this machine by an address that no other one reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets, or its last group would read as the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_all(host: str, port: int, option: str) -> list[socket.socket]:
    """Return a socket for each address of `host`, bound to one port; 0 takes a free one. Raises ConfigError.

    An address that this machine lacks, as localhost may have one of IPv6, is left out if there is another. option: that
    of the port.
    """
    listeners = list[socket.socket]()
    missing = list[OSError]()
    # Both loopback addresses, as RFC 6761 and gRPC read it; some machines' hosts file has one.
    names = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    try:
        found = [one for name in names for one in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            own_port = listeners[0].getsockname()[1] if listeners else port
            try:
                listeners.append(_bind(family, (address[0], own_port, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing.append(error)
        if not listeners:
            raise missing[0]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise cannot_listen(host, port, error, option) from None
    return listeners


def _bind(family: int, address: tuple[str | int, ...]) -> socket.socket:
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def check_free(host: str, port: int, option: str) -> None:
    """Raise ConfigError when nobody can listen on host:port, before two models are loaded only to find out."""
    if port:
        for listener in bind_all(host, port, option):
            listener.close()


def next_free(host: str, port: int, taken: Collection[int | None] = ()) -> int:
    """Return the first port above `port` on which somebody can listen, and which is not taken; 0 where there is none,
    so that any free one is. Raises ConfigError for a host that is not this machine's.
    """
    for candidate in range(port + 1, _MOST_PORT + 1):
        if candidate in taken:
            continue
        try:
            check_free(host, candidate, "--grpc-port")
        except ConfigError as error:
            if error.param == "host":
                raise
            continue
        return candidate
    return 0


def cannot_listen(host: str, port: int, error: OSError, option: str) -> ConfigError:
    """Return what to say of a socket that could not be bound. `param` says which of the two to change.

    option: that of the port.
    """
    is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    remedy = "--host must be an address of this machine" if is_elsewhere else f"choose another with {option}"
    return ConfigError(
        f"cannot listen on {join_host_port(host, port)}: {error.strerror}; {remedy}",
        param="host" if is_elsewhere else "port",
    )
