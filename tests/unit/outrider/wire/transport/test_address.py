"""Addresses that are printed can be dialled, IPv6 too; and a message limit too small for one row is refused."""

from __future__ import annotations

import socket

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.wire.errors import ConfigError
from outrider.wire.transport.address import bind_all, check_free, is_host_port, join_host_port
from outrider.wire.transport.rpc import client_options, proxy_note
from outrider.wire.transport.serving import start_server


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


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


WITH_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    "host, scheme",
    [
        ("127.0.0.1", ""),
        ("127.0.0.1", "ipv4:"),
        ("127.0.0.1", "dns:///"),
        pytest.param("::1", "", marks=WITH_IPV6),
        pytest.param("::1", "ipv6:", marks=WITH_IPV6),
    ],
)
async def test_a_server_answers_at_the_address_it_gives(
    host: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment names a proxy, too, which knows nothing of this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server, address, _ = await start_server(lambda _: [], host, 0, 1 << 20)
    address = scheme + address
    try:
        async with grpc.aio.insecure_channel(address, options=client_options(address, 1 << 20)) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(None)


def test_a_proxy_is_named_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_note("gpu-1:80") == ""
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    assert proxy_note("gpu-1:80").startswith("; http_proxy names a proxy")
    assert proxy_note("localhost:80") == proxy_note("ipv4:127.0.0.1:80") == ""
    monkeypatch.setenv("grpc_proxy", "")
    assert proxy_note("gpu-1:80") == "", "gRPC takes an empty one for none"


async def test_why_a_server_cannot_listen_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no address is known for 'no-such-host\.invalid'") as caught:
        await start_server(lambda _: [], "no-such-host.invalid", 0, 1 << 20)
    assert caught.value.param == "host"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is taken") as caught:
            await start_server(lambda _: [], "127.0.0.1", port, 1 << 20)
    assert caught.value.param == "port"


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
