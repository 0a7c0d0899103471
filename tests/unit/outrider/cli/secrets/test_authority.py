"""`outrider certs`: what it makes serves, what it makes again is of the same CA, and who can read the keys."""

import errno
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.secrets.authority import write_certificates
from outrider.wire.errors import ConfigError
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CertificateFolder
from tests.certificates import now

RUNNER = CliRunner()


def names(path: Path) -> list[Any]:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def test_the_folders_are_what_the_parts_take(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["certs", str(tmp_path), "--host", "gw.example.com", "--host", "10.0.0.7"])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / name) for name in (*(r.value for r in Role), "public")]
    for role in Role:
        assert CertificateFolder(str(tmp_path / role.value), "tls_dir", role).needs_client_certificates
        assert names(tmp_path / role.value / "cert.pem") == [role.uri, role.host_name]
    public = CertificateFolder(str(tmp_path / "public"), "public_tls_dir", None)
    assert not public.needs_client_certificates
    assert names(tmp_path / "public" / "cert.pem") == ["gw.example.com", "10.0.0.7"]


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], now())
    keys = [tmp_path / "ca-key.pem", *tmp_path.glob("*/key.pem")]
    assert len(keys) == 6
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert not list(tmp_path.rglob(".*")), "nothing half written is left"


def test_a_write_that_fails_leaves_no_piece_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("outrider.wire.settings.files.os.replace", full)
    with pytest.raises(ConfigError, match=r"cannot write .*ca-key.pem: No space left on device"):
        write_certificates(tmp_path, [], now())
    assert not list(tmp_path.iterdir())


def test_a_second_call_renews_with_the_same_ca_and_hosts(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["gw.example.com"], now())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    gateway = CertificateFolder(str(tmp_path / "gateway"), "tls_dir", Role.GATEWAY)
    first = gateway.current
    write_certificates(tmp_path, [], now())
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    same = {str(path.relative_to(tmp_path)) for path in before if before[path] == after[path]}
    assert same == {"ca.pem", "ca-key.pem", *(f"{role.value}/ca.pem" for role in Role)}
    assert gateway.current is not first
    assert names(tmp_path / "public" / "cert.pem") == ["gw.example.com"]
    write_certificates(tmp_path, ["other.example.com"], now())
    assert names(tmp_path / "public" / "cert.pem") == ["other.example.com"]
