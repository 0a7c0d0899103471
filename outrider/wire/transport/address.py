"""Functions for addresses (host:port) and for sockets that listen on them, with error messages for users."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Any

from outrider.wire.errors import ConfigError

_HOST_PORT = re.compile(r"(\[[0-9a-f:.]+(%[\w.-]+)?\]|[\w.-]+):([0-9]{1,5})", re.ASCII | re.IGNORECASE)
_MAX_PORT = 2**16 - 1
GRPC_PORT_HEADER = "x-outrider-grpc-port"
"""HTTP header in which a gateway sends its gRPC port with every reply to /v1/models."""


def is_host_port(text: str) -> bool:
    """Return whether the text is host:port and nothing else. A URL made from such a text has no user, path or query."""
    found = _HOST_PORT.fullmatch(text)
    return found is not None and int(found[3]) <= _MAX_PORT


def is_loopback(host: str) -> bool:
    """Return whether the host is localhost or a loopback address, which other machines cannot reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_host_port(host: str, port: int) -> str:
    """Return host:port as one text. An IPv6 address is put into brackets."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def bind_all(host: str, port: int, option: str) -> list[socket.socket]:
    """Return one socket per address of `host`, all bound to the same port. port: 0 = take a free port. option: name of
    the port's command-line option, for the error.

    If `host` has several addresses, those that this machine does not have are left out; on some machines that is
    localhost's IPv6 address. Raises ConfigError if a socket cannot be bound.
    """

    listeners = list[socket.socket]()
    missing = list[OSError]()
    try:
        for family, address in _addresses_of(host, port):
            own_port = port
            if listeners:
                own_port = listeners[0].getsockname()[1]
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


def _addresses_of(host: str, port: int) -> Iterable[tuple[int, tuple[Any, ...]]]:
    # For localhost both loopback addresses, as RFC 6761 and gRPC have it: the hosts file of some machines has only one.
    names = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    addresses: dict[tuple[int, tuple[Any, ...]], None] = {}  # without duplicates, in order
    for name in names:
        for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
            addresses[family, address] = None
    return addresses


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
    """Raise ConfigError if no server can listen on host:port now. Port 0 always counts as free. Call it before loading
    a model, so that the error comes early. option: name of the port's command-line option, for the error.
    """
    if port:
        for listener in bind_all(host, port, option):
            listener.close()


def next_free(host: str, port: int, used: Collection[int | None] = ()) -> int:
    """Return the first free port above `port` that is not in `used`. If there is none, return 0, with which a server
    takes any free port. Raises ConfigError if `host` is not an address of this machine.
    """
    for candidate in range(port + 1, _MAX_PORT + 1):
        if candidate in used:
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
    """Return the ConfigError for a socket that could not be bound to host:port. The error's `param` is "host" or
    "port", whichever the user must change.

    error: the error of the socket. option: name of the port's command-line option.
    """
    param = "port"
    remedy = f"choose another with {option}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        param = "host"
        remedy = "--host must be an address of this machine"
    return ConfigError(f"cannot listen on {join_host_port(host, port)}: {error.strerror}; {remedy}", param=param)
