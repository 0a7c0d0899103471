"""Which method is for which certificate's role."""

from pathlib import Path

import pytest

from outrider.v1 import draft_pb2, registry_pb2, target_pb2
from outrider.wire.errors import ConfigError, Forbidden
from outrider.wire.transport.roles import Role, check_may_call
from outrider.wire.transport.tls import CertificateFolder
from tests.certificates import authority, part_folder


def target_of(folder: Path) -> CertificateFolder:
    return CertificateFolder(str(folder), "tls_dir", Role.TARGET)


def test_another_roles_certificate_is_refused(tmp_path: Path) -> None:
    folder = part_folder(tmp_path / "draft", authority(), Role.DRAFT)
    with pytest.raises(ConfigError, match=r"cert.pem is not a target's: it lacks the names outrider://target and"):
        target_of(folder)


_METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (draft_pb2, target_pb2, registry_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_MAY = {
    Role.GATEWAY: {"GetInfo", "GetTokenizer", "Control", "Pair", "Join"},
    Role.DRAFT: {"Deliver", "Probe", "GetInfo", "TargetService/GetTokenizer"},
    Role.TARGET: {"TargetService/GetInfo"},
    Role.LAUNCHER: {"GetInfo", "Scale"},
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("method", _METHODS)
def test_every_method_is_for_its_roles_alone(method: str, role: Role) -> None:
    uris = ["spiffe://elsewhere/target", role.uri]
    if any(method.endswith(("." if "/" in name else "/") + name) for name in _MAY[role]):
        check_may_call(method, uris)
    else:
        with pytest.raises(Forbidden, match=f"the caller's certificate is {role.value}; {method} is for "):
            check_may_call(method, uris)


def test_a_certificate_without_a_role_may_call_health_alone() -> None:
    check_may_call("/grpc.health.v1.Health/Check", [])
    for method in [*_METHODS, "/outrider.v1.DraftService/NotYetKnown"]:
        with pytest.raises(Forbidden, match="the caller's certificate is without a role"):
            check_may_call(method, ["outrider://user", "outrider://gateway/x"])
