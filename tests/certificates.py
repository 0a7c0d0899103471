"""Folders of certificates for tests: right ones, and every wrong one that a peer may come with."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from outrider.cli.secrets.authority import Authority, host_name, write_certificates
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CA, CERTIFICATE, KEY


def now() -> datetime:
    return datetime.now(UTC)


def all_folders(folder: Path, *hosts: str) -> Path:
    """As `outrider certs` makes them."""
    write_certificates(folder, hosts, now())
    return folder


def authority() -> Authority:
    return Authority.create(now())


def role_names(role: Role) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(role.uri), x509.DNSName(role.host_name)]


def write_folder(folder: Path, certificate: bytes, key: bytes, ca: Authority | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KEY).touch(0o600)
    (folder / KEY).write_bytes(key)
    (folder / CERTIFICATE).write_bytes(certificate)
    if ca is not None:
        (folder / CA).write_bytes(ca.certificate.public_bytes(Encoding.PEM))
    return folder


def part_folder(
    folder: Path, ca: Authority, role: Role, *, trusts: Authority | None = None, expired: bool = False
) -> Path:
    """trusts: whose certificates it believes, if not those of its own CA."""
    issued = now() - timedelta(days=60 if expired else 0)
    certificate, key = ca.issue(f"a {role.value}", role_names(role), issued, timedelta(days=30))
    return write_folder(folder, certificate, key, trusts or ca)


def public_folder(folder: Path, ca: Authority, *hosts: str, users: Authority | None = None) -> Path:
    """users: the CA whose certificates users must show."""
    certificate, key = ca.issue("users", [host_name(host) for host in hosts], now())
    return write_folder(folder, certificate, key, users)
