"""The registry with certificates: gateways join it, the launcher's own certificate scales, others may neither."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.registry import Registry
from outrider.v1 import registry_pb2 as pb
from outrider.v1 import registry_pb2_grpc
from outrider.wire.roles import Role
from outrider.wire.serving import ServerThread
from outrider.wire.tls import CertificateFolder, channel_credentials
from tests.certificates import all_folders

TIMEOUT_S = 20.0


def scale(pool: str, workers: int | None) -> Future[pb.ScaleReply]:
    done: Future[pb.ScaleReply] = Future()
    done.set_result(pb.ScaleReply())
    return done


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_folders(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def registry(folders: Path) -> Iterator[Registry]:
    registry = Registry(scale)
    certificates = CertificateFolder(str(folders / "launcher"), "ray.tls_dir", Role.LAUNCHER)
    registry.start("127.0.0.1:0", certificates)
    registry.publish(pb.Membership(version=7))
    yield registry
    registry.stop()


def join(stub: Any) -> int:
    call = stub.Join(iter([pb.GatewayReport(gateway="g")]), timeout=TIMEOUT_S)
    version: int = next(call).version
    call.cancel()
    return version


def scaling(stub: Any) -> int:
    stub.Scale(pb.ScaleRequest(pool="p"), timeout=TIMEOUT_S)
    return 0


@pytest.mark.parametrize("role", Role)
def test_each_role_may_do_what_is_its_own(registry: Registry, folders: Path, role: Role) -> None:
    credentials = channel_credentials(CertificateFolder(str(folders / role.value), "tls_dir", role).current)
    name = [("grpc.ssl_target_name_override", Role.LAUNCHER.host_name)]
    with grpc.secure_channel(registry.address, credentials, options=name) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for call, allowed, answer in ((join, Role.GATEWAY, 7), (scaling, Role.LAUNCHER, 0)):
            if role is allowed:
                assert call(stub) == answer
                continue
            with pytest.raises(grpc.RpcError) as refused:
                call(stub)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert refused.value.details().endswith(f"is for {allowed.value}")


def test_without_certificates_it_warns_of_an_open_port(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerThread, "start", lambda _, add_services, host, port, *rest: f"{host}:{port}")
    with caplog.at_level(logging.WARNING):
        registry = Registry(scale)
        assert registry.start("0.0.0.0:7000", None) == "0.0.0.0:7000"
        registry.loop.close()
    assert "listening on 0.0.0.0 without tls_dir" in caplog.text
