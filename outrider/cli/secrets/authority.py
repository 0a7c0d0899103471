"""Makes certificates for mutual TLS between the parts of a system, and for the gateway's users. For `certs.py`.

They are signed by a private certificate authority. The authority's key and certificate are in a folder, which also has
a folder for the certificate of each part. Needs the library cryptography (the extra `certs`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.wire.errors import ConfigError
from outrider.wire.settings.files import write_whole
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CA, CERTIFICATE, KEY

CA_KEY = "ca-key.pem"
"""Name of the file with the certificate authority's private key."""
PUBLIC = "public"
"""Name of the folder with the certificate that the gateway shows to its users."""
CA_LIFE = timedelta(days=3650)
"""Time (timedelta) for which the certificate of a new authority is valid."""
LIFE = timedelta(days=365)
"""Default time (timedelta) for which a certificate that the authority issues is valid."""
_BACKDATED = timedelta(minutes=5)
"""How long before its creation the validity of a certificate begins, since the clocks of machines differ."""

_NO_HOST = re.compile("[ :/,]")
"""Matches a character that a host name cannot contain."""

PrivateKey = ec.EllipticCurvePrivateKey
Names = Sequence[x509.GeneralName]


@dataclass(frozen=True)
class Authority:
    """A certificate authority: its private key and its own certificate."""

    key: PrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, now: datetime) -> Authority:
        """Create a new authority, whose certificate is valid for CA_LIFE from `now`."""
        key = _new_key()
        name = _name("Outrider CA")
        builder = _builder(name, name, key, now, now + CA_LIFE)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def read(cls, folder: Path) -> Authority | None:
        """Read the authority whose files are in a folder; None = it has none. Raises ConfigError for damaged files."""
        if not (folder / CA_KEY).exists() and not (folder / CA).exists():
            return None
        try:
            key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"cannot read {error.filename}: {error.strerror}; both of the CA's files are needed"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder / CA_KEY} or {folder / CA} is damaged: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}")
        return cls(key, certificate)

    def issue(self, common_name: str, names: Names, now: datetime, life: timedelta = LIFE) -> tuple[bytes, bytes]:
        """Issue a certificate that can be used by servers and clients. Return (certificate, private key) as PEM.

        It is valid for `life` from `now`, but not longer than the authority's own certificate. names: host names and
        URIs of the certificate's owner.
        """
        key = _new_key()
        until = min(now + life, self.certificate.not_valid_after_utc)
        builder = _builder(_name(common_name), self.certificate.subject, key, now, until)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(signer, critical=False)
        return _certificate_pem(builder.sign(self.key, hashes.SHA256())), _key_pem(key)


def write_certificates(folder: Path, hosts: Sequence[str], now: datetime) -> list[Path]:
    """Write new certificates for every role and for the gateway's users into `folder`. If there is no authority yet,
    create one. Return the folders of the certificates.

    hosts: names and addresses by which users reach the gateway. Empty = the names in the users' certificate that
    `folder` already has or, without one, localhost, 127.0.0.1 and ::1. A role's certificate names the role in place of
    a host, so that a user's client does not accept a worker as the gateway. Raises ConfigError for files or hosts that
    cannot be used.
    """
    users = folder / PUBLIC
    names = list(map(host_name, hosts)) or _names_in(users / CERTIFICATE) or _this_machine()
    authority = Authority.read(folder)
    if authority is None:
        authority = Authority.create(now)
        _write(folder / CA_KEY, _key_pem(authority.key), private=True)
        _write(folder / CA, _certificate_pem(authority.certificate))
    if authority.certificate.not_valid_after_utc <= now:
        raise ConfigError(f"the CA {folder / CA} has expired; take the folder away, and every part gets new ones")
    for role in Role:
        own = [x509.UniformResourceIdentifier(role.uri), x509.DNSName(role.host_name)]
        _write_pair(folder / role.value, *authority.issue(f"outrider {role.value}", own, now))
        _write(folder / role.value / CA, _certificate_pem(authority.certificate))
    _write_pair(users, *authority.issue("outrider", names, now))  # a ca.pem here would ask users for certificates
    return [*(folder / role.value for role in Role), users]


def _write_pair(folder: Path, certificate: bytes, key: bytes) -> None:
    _write(folder / KEY, key, private=True)
    _write(folder / CERTIFICATE, certificate)


def host_name(text: str) -> x509.GeneralName:
    """Parse an IP address, or a DNS name such as *.example.com, into a name for a certificate. Raises ConfigError for
    any other text.
    """
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    if not text or text.startswith(("http:", "https:")) or _NO_HOST.search(text):
        raise ConfigError(f"host is {text!r}, must be a name or an IP address, without a port", param="host")
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise ConfigError(f"host is {text!r}: {error}", param="host") from None


def _names_in(path: Path) -> list[x509.GeneralName]:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        return list(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []


def _this_machine() -> list[x509.GeneralName]:
    return list(map(host_name, ("localhost", "127.0.0.1", "::1")))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(until)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    write_whole(path, content, private=private)
