"""Ports that are chosen before their worker starts: free, different, and none that the kernel gives away meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy import ports
from deploy.ports import Ports, lasting_ports
from outrider.wire.errors import ConfigError


def test_ports_are_free_different_and_lasting() -> None:
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chooser = Ports()
    chosen = [chooser.free("127.0.0.1") for _ in range(50)]
    assert len(set(chosen)) == 50
    if low > 20_000 or high < 65_535:
        assert not [port for port in chosen if low <= port <= high]
    for port in chosen:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        monkeypatch.setattr(ports, "lasting_ports", lambda: [taken.getsockname()[1], free])
        chooser = Ports()
        assert chooser.free("127.0.0.1") == free
        with pytest.raises(ConfigError, match=r"no free port on '127\.0\.0\.1'"):
            chooser.free("127.0.0.1")


@pytest.mark.parametrize(
    ("given", "left"), [("32768\t60999", 12_768 + 4_536), ("1024 65535", 45_536), ("1024 30000", 35_535)]
)
def test_the_kernels_range_is_left_to_it(
    given: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(given)
    monkeypatch.setattr(ports, "_KERNELS_RANGE", file)
    assert len(lasting_ports()) == left


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on host '192\.0\.2\.1'"):
        Ports().free("192.0.2.1")
