"""Write host:port as gRPC, browsers and people do, and say why nobody can listen there."""

from __future__ import annotations

import errno
import re
import socket
from ipaddress import ip_address

from outrider.wire.errors import ConfigError

_HOST_PORT = re.compile(r"(\[[0-9a-f:.]+(%[\w.-]+)?\]|[\w.-]+):([0-9]{1,5})", re.ASCII | re.IGNORECASE)
_MOST_PORT = 2**16 - 1


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
