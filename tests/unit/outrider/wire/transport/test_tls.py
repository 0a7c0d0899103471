"""Folders of certificates: what is refused and how it is named, what is read again and when."""

import logging
import ssl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from outrider.wire.errors import ConfigError
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import (
    CA,
    CERTIFICATE,
    KEY,
    CertificateFolder,
    Certificates,
    public_certificates,
    role_certificates,
)
from tests.certificates import authority, now, part_folder, public_folder, role_names, write_folder


def target_of(folder: Path) -> CertificateFolder:
    return CertificateFolder(str(folder), "tls_dir", Role.TARGET)


def test_a_right_folder_is_taken_and_its_key_is_never_shown(tmp_path: Path) -> None:
    folder = part_folder(tmp_path / "target", authority(), Role.TARGET)
    current = target_of(folder).current
    assert current.certificate == (folder / CERTIFICATE).read_bytes()
    assert current.context.verify_mode is ssl.CERT_REQUIRED
    assert "PRIVATE" not in repr(current)


@pytest.mark.parametrize("name", [CA, CERTIFICATE, KEY])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = part_folder(tmp_path / "target", authority(), Role.TARGET)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"tls_dir: cannot read {folder / name}: No such file") as refused:
        target_of(folder)
    assert refused.value.param == "tls_dir"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_dir: '.*absent' is no folder; make one with `outrider certs`"):
        target_of(tmp_path / "absent")


def _other_key(folder: Path) -> None:
    (folder / KEY).write_bytes(authority().issue("other", [], now())[1])


def _with_passphrase(folder: Path) -> None:
    key = load_pem_private_key((folder / KEY).read_bytes(), None)
    (folder / KEY).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def _other_ca(folder: Path) -> None:
    (folder / CA).write_bytes(authority().certificate.public_bytes(Encoding.PEM))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_key, "key.pem is not the key of .*cert.pem"),
        (_with_passphrase, "key.pem has a passphrase; give it without one"),
        (_write(CERTIFICATE, b"nothing"), "cert.pem or .*key.pem is not in PEM form"),
        (_write(KEY, b""), "cert.pem or .*key.pem is not in PEM form"),
        (_write(CA, b"nothing"), "ca.pem holds no certificates in PEM form"),
        (_write(CA, b"\xff\xfe"), "ca.pem holds no certificates in PEM form"),
        (_other_ca, "cert.pem: unable to get local issuer certificate; renew it, or give the ca.pem of who signed it"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    folder = part_folder(tmp_path / "target", authority(), Role.TARGET)
    change(folder)
    with pytest.raises(ConfigError, match=words):
        target_of(folder)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    ca = authority()
    with pytest.raises(ConfigError, match=r"cert.pem: certificate has expired; renew it"):
        target_of(part_folder(tmp_path / "target", ca, Role.TARGET, expired=True))
    certificate, key = ca.issue("users", [], now() - timedelta(days=9), timedelta(days=1))
    with pytest.raises(ConfigError, match=r"public_tls_dir: .*cert.pem: certificate has expired; renew it"):
        CertificateFolder(str(write_folder(tmp_path / "public", certificate, key, None)), "public_tls_dir", None)


@pytest.mark.parametrize(("num_days", "warned"), [(3, True), (20, False)])
def test_one_that_expires_soon_is_warned_of(
    tmp_path: Path, num_days: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority().issue("users", [], now(), timedelta(days=num_days))
    folder = write_folder(tmp_path / "public", certificate, key, None)
    with caplog.at_level(logging.WARNING):
        CertificateFolder(str(folder), "public_tls_dir", None)
    assert (f"public_tls_dir: {folder / CERTIFICATE} expires in 3.0 days; renew it" in caplog.text) is warned


def test_one_that_grows_old_while_it_serves_is_warned_of_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority().issue("users", [], now(), timedelta(days=20))
    folder = CertificateFolder(str(write_folder(tmp_path / "public", certificate, key, None)), "public_tls_dir", None)
    start, monotonic = time.time(), time.monotonic()
    counts = []
    with caplog.at_level(logging.WARNING):
        for num_days in (0.0, 5.0, 7.0, 7.5, 8.1, 8.2):
            monkeypatch.setattr("outrider.wire.transport.tls.time.time", lambda days=num_days: start + days * 86400)
            monkeypatch.setattr(
                "outrider.wire.transport.tls.time.monotonic", lambda days=num_days: monotonic + days * 86400
            )
            assert folder.current.certificate == certificate
            counts.append(len(caplog.records))
    assert counts == [0, 0, 1, 1, 2, 2]
    assert "cert.pem expires in 13.0 days; renew it" in caplog.text


def test_users_need_certificates_when_there_is_a_ca(tmp_path: Path) -> None:
    plain = CertificateFolder(str(public_folder(tmp_path / "a", authority(), "localhost")), "public_tls_dir", None)
    assert not plain.needs_client_certificates and plain.current.context.verify_mode is ssl.CERT_NONE
    folder = public_folder(tmp_path / "b", authority(), "localhost", users=authority())
    asking = CertificateFolder(str(folder), "public_tls_dir", None)
    assert asking.needs_client_certificates and asking.current.context.verify_mode is ssl.CERT_REQUIRED


def test_a_folder_half_written_is_left_until_it_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = part_folder(tmp_path / "target", authority(), Role.TARGET)
    folder = target_of(path)
    first = folder.current
    other = part_folder(tmp_path / "other", authority(), Role.TARGET)
    with caplog.at_level(logging.WARNING):
        for name in (KEY, CERTIFICATE):
            (path / name).write_bytes((other / name).read_bytes())
            assert folder.current is first and folder.current is first
    assert [record.message.split(": ")[0] for record in caplog.records] == ["the certificates before stay in use"] * 2
    (path / CA).write_bytes((other / CA).read_bytes())
    assert folder.current.ca == (other / CA).read_bytes()


def test_no_call_waits_while_files_are_being_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop asks at each connection."""
    path = part_folder(tmp_path / "target", authority(), Role.TARGET)
    folder = target_of(path)
    first, read_once = folder.current, folder._read_once

    def read_while_written() -> Certificates:
        found = read_once()
        (path / CA).write_bytes((path / CA).read_bytes() + b"\n")
        return found

    monkeypatch.setattr("outrider.wire.transport.tls._SETTLE_S", 3600.0)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_read_once", read_while_written)
        (path / CA).write_bytes((path / CA).read_bytes() + b"\n")
        assert folder.current is first
    assert folder.current.ca == (path / CA).read_bytes() != first.ca


def test_one_that_is_not_yet_valid_is_taken_up_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a PKI whose clock is ahead of this machine's."""
    path, ca = part_folder(tmp_path / "target", authority(), Role.TARGET), authority()
    folder = target_of(path)
    first = folder.current
    begins = now() + timedelta(minutes=5, seconds=3)  # an authority's own are valid from five minutes before
    write_folder(path, *ca.issue("early", role_names(Role.TARGET), begins), ca)
    with caplog.at_level(logging.WARNING):
        assert folder.current is first
        monkeypatch.setattr("outrider.wire.transport.tls.RETRY_S", 0.1)
        folder._retry_at_s = 0.0
        assert folder.current is first
        assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
            "certificate is not yet valid; renew it, or give the ca.pem of who signed it"
        ]
        until = time.monotonic() + 20
        while folder.current is first and time.monotonic() < until:
            time.sleep(0.2)
    assert folder.current.certificate == (path / CERTIFICATE).read_bytes() != first.certificate


def test_a_link_that_is_turned_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret."""
    for name in ("old", "new"):
        part_folder(tmp_path / name, authority(), Role.TARGET)
    (tmp_path / "data").symlink_to("old")
    folder = target_of(tmp_path / "data")
    first = folder.current
    (tmp_path / "turned").symlink_to("new")
    (tmp_path / "turned").replace(tmp_path / "data")
    assert folder.current is not first


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o440, False), (0o644, True), (0o620, True)])
def test_a_key_that_others_may_read_or_change_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    part_folder(tmp_path, authority(), Role.TARGET)
    (tmp_path / KEY).chmod(mode)
    target_of(tmp_path)
    warning = f"{tmp_path / KEY} has mode {mode:04o}: other accounts may read or change it; chmod 600 it"
    assert (warning in caplog.text) is is_warned


def test_asking_users_does_not_begin_or_end_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = public_folder(tmp_path / "public", authority(), "localhost")
    folder = CertificateFolder(str(path), "public_tls_dir", None)
    first = folder.current
    (path / CA).write_bytes(authority().certificate.public_bytes(Encoding.PEM))
    with caplog.at_level(logging.WARNING):
        assert folder.current is first
    assert "restart to ask users for certificates" in caplog.text


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", 0), ("::1", 0), ("localhost", 0), ("0.0.0.0", 1), ("w", 1)])
def test_listening_beyond_this_machine_without_certificates_is_warned_of(
    host: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert role_certificates(None, Role.DRAFT, host) is None
        assert public_certificates(None, host) is None
        assert role_certificates(None, Role.GATEWAY) is None
    assert len(caplog.records) == 2 * warned
