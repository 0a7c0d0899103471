"""The registry with certificates: gateways join it, the launcher's own certificate scales, others may neither."""

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.registry import Registry
from deploy.sightings import Sighting, WorkerCalls
from outrider.cli.secrets.authority import Authority
from outrider.v1 import registry_pb2 as pb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CertificateFolder
from tests.certificates import all_folders, authority, part_folder
from tests.service.test_registry import Scaled, played_draft
from tests.waiting import wait_until

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_folders(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def registry(folders: Path) -> Iterator[Registry]:
    registry = Registry(Scaled())
    certificates = CertificateFolder(str(folders / "launcher"), "ray.tls_dir", Role.LAUNCHER)
    registry.start("127.0.0.1:0", certificates)
    registry.send_membership(pb.WorkerList(version=7))
    yield registry
    registry.stop()


def join(stub: Any) -> int:
    call = stub.Join(iter([pb.GatewayReport(gateway="g", protocol=PROTOCOL)]), timeout=TIMEOUT_S)
    version: int = next(call).version
    call.cancel()
    return version


def seen_first(registry: Registry, address: str, certificates: CertificateFolder) -> Sighting:
    """By a launcher with these."""
    eyes = WorkerCalls(registry.loop, certificates)
    eyes.watch("draft-0", "draft", address)
    found = wait_until(eyes.read_sightings, "no sight of it")
    eyes.forget("draft-0")
    return found[0]


def test_a_worker_that_does_not_take_the_launchers_certificate_is_seen_to_live(
    registry: Registry, tmp_path: Path
) -> None:
    """Who is silent or gone is not."""
    ours, others = authority(), authority()
    right = CertificateFolder(str(part_folder(tmp_path / "right", ours, Role.LAUNCHER)), "tls_dir", Role.LAUNCHER)
    draft = CertificateFolder(str(part_folder(tmp_path / "draft", ours, Role.DRAFT)), "tls_dir", Role.DRAFT)

    def outdated(name: str, ca: Authority, **more: Any) -> Any:
        """A folder that was right when it was read."""
        path = part_folder(tmp_path / name, ca, Role.LAUNCHER, **more)
        now = {"ca": path / "ca.pem", "certificate": path / "cert.pem", "key": path / "key.pem"}
        read = {part: file.read_bytes() for part, file in now.items()}
        return SimpleNamespace(current=dataclasses.replace(right.current, **read))

    target = CertificateFolder(str(part_folder(tmp_path / "target", ours, Role.TARGET)), "tls_dir", Role.TARGET)
    refused = {
        "a target's": target,
        "an expired one": outdated("expired", ours, expired=True),
        "another CA's": outdated("other", others, trusts=ours),
        "of a CA that neither knows": outdated("stranger", others),
    }
    with played_draft(draft) as (_, server):
        address = server.address
        first = seen_first(registry, address, right)
        seen = {what: seen_first(registry, address, folder) for what, folder in refused.items()}
    assert (first.info is not None, first.refusal) == (True, None)
    for what, one in seen.items():
        assert one.info is None and one.refusal is not None, what
    assert "PERMISSION_DENIED" in str(seen["a target's"].refusal)
    assert seen_first(registry, address, right).refusal is None, "it is gone"
    with socket.socket() as silent:  # as of a stopped process
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        one = seen_first(registry, f"127.0.0.1:{silent.getsockname()[1]}", right)
        assert (one.info, one.refusal) == (None, None)
