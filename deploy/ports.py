"""Ports chosen for workers before they start, and kept: a restarted worker must find its own free again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from outrider.wire.errors import ConfigError

_FIRST, _LAST = 20_000, 65_535  # Ray's own workers take from 10,000 to 19,999
_TRIES = 200
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports:
    """Hands out ports of one machine, each once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def free(self, host: str) -> int:
        """A port of `host` that nobody listens on now, nor will by chance. Raises ConfigError when none is found."""
        candidates = [port for port in lasting_ports() if port not in self._given]
        for port in random.sample(candidates, min(_TRIES, len(candidates))):
            if _is_free(host, port):
                self._given.add(port)
                return port
        raise ConfigError(f"no free port on {host!r} after {_TRIES} tries; name one with target.port and draft.port")


def lasting_ports() -> list[int]:
    """Those that the kernel gives to nobody by itself, who connects or binds port 0; all where it gives from all."""
    ports = range(_FIRST, _LAST + 1)
    if not _KERNELS_RANGE.exists():
        return list(ports)
    low, high = (int(word) for word in _KERNELS_RANGE.read_text().split())
    return [port for port in ports if not low <= port <= high] or list(ports)


def _is_free(host: str, port: int) -> bool:
    """Raises ConfigError when `host` is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))  # a wrong host must not look like a taken port
        except OSError as error:
            raise ConfigError(
                f"cannot listen on host {host!r}: {error.strerror}; name an address of this machine"
            ) from None
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
