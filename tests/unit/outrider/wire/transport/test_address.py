"""Addresses that are printed can be dialled, IPv6 too; and a message limit too small for one row is refused."""

import socket

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.transport.address import bind_all, check_free, is_host_port, join_host_port


@pytest.mark.parametrize(
    "host, joined",
    [("127.0.0.1", "127.0.0.1:80"), ("gpu-1", "gpu-1:80"), ("::1", "[::1]:80"), ("fe80::1%eth0", "[fe80::1%eth0]:80")],
)
def test_ipv6_is_bracketed(host: str, joined: str) -> None:
    assert join_host_port(host, 80) == joined and is_host_port(joined)


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "[::1", "[::1]", "a:80/x", "a:80?x", "u@a:80", "a:80#", "a:8\n", "a b:80"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    assert not is_host_port(text)


def test_localhost_is_both_loopback_addresses_as_grpc_reads_it() -> None:
    listeners = bind_all("localhost", 0, "--port")
    assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.1", "::1"]
    for listener in listeners:
        listener.close()


def test_each_address_of_a_name_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(host: str, port: int, **_: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port)),  # which this machine lacks
        ]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    listeners = bind_all("name", 0, "--port")
    ports = {listener.getsockname()[0]: listener.getsockname()[1] for listener in listeners}
    assert list(ports) == ["127.0.0.1", "127.0.0.2"]
    assert len(set(ports.values())) == 1
    port = ports["127.0.0.2"]
    listeners[0].close()
    listeners[1].listen()
    with pytest.raises(ConfigError, match=f"cannot listen on name:{port}: Address already in use; choose another"):
        check_free("name", port, "--port")
    listeners[1].close()
    check_free("name", port, "--port")
