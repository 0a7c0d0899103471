"""Where a server listens, and why it cannot."""

import socket

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.wire.errors import ConfigError
from outrider.wire.transport.rpc import client_options
from outrider.wire.transport.serving import start_server


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


async def test_the_reason_why_a_server_cannot_listen_is_raised() -> None:
    with pytest.raises(ConfigError, match=r"no address is known for 'no-such-host\.invalid'") as caught:
        await start_server(lambda _: [], "no-such-host.invalid", 0, 1 << 20)
    assert caught.value.param == "host"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is taken") as caught:
            await start_server(lambda _: [], "127.0.0.1", port, 1 << 20)
    assert caught.value.param == "port"
