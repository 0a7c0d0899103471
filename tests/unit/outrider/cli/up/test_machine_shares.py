"""What of this machine each part of a system gets."""

import socket

import pytest

from outrider.cli.up.machine_shares import with_grpc_port
from outrider.cli.up.supervisor import Supervisor
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import SystemConfig, merge_settings
from tests.unit.outrider.wire.settings.clusters import NO_FLAGS


def test_grpc_goes_to_the_next_free_port_where_that_of_http_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def grpc_port(gateway: dict[str, object]) -> object:
        settings = merge_settings({"gateway": gateway}, NO_FLAGS, no_draft=False, no_ray=True, certificates=None)
        return with_grpc_port(settings).gateway.get("grpc_port")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = grpc_port({"port": port - 1})
        assert isinstance(found, int) and found > port
        assert grpc_port({"port": port - 2, "metrics_port": port - 1}) == found
    assert grpc_port({"port": 0}) == 0
    assert grpc_port({"port": 9, "grpc_port": 12}) == 12
    assert grpc_port({}) is None


def test_gateways_have_ports_of_their_own() -> None:
    def ports(gateways: int, **gateway: int) -> list[tuple[int | None, ...]]:
        config = SystemConfig.read({"target": {"model": "t"}, "gateways": gateways, "gateway": gateway})
        made = [Supervisor(config, StopFlag())._gateway_config(index, registry="a:1") for index in range(gateways)]
        names = ["port", "grpc_port", *(["metrics_port"] if "metrics_port" in gateway else [])]
        return [tuple(getattr(one, name) for name in names) for one in made]

    assert ports(1) == [(8000, 8001)]
    assert ports(3) == [(8000, 8001), (8002, 8003), (8004, 8005)]
    assert ports(3, port=8002, grpc_port=8000) == [(8002, 8000), (8005, 8003), (8008, 8006)]
    assert ports(2, port=8000, grpc_port=9000) == [(8000, 9000), (8001, 9001)]
    assert ports(2, metrics_port=8002) == [(8000, 8001, 8002), (8003, 8004, 8005)]
    assert ports(2, port=0, grpc_port=0) == [(0, 0), (0, 0)]
    with pytest.raises(ConfigError, match="gateway 1 would have 65536"):
        ports(2, port=65535, grpc_port=100)
