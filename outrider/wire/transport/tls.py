"""TLS certificates: they are read from a folder, checked, and read again when they change. Used by servers and clients
for gRPC and HTTP.

A folder has three files: cert.pem (the certificate, then the certificates between it and its CA), key.pem (its private
key, without a passphrase) and ca.pem (the CAs that the other side's certificate may come from). Only `Dialer` opens
channels to other parts of the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.wire.errors import ConfigError
from outrider.wire.processes.private_file import warn_if_open
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import is_loopback
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import client_options

log = get_logger(__name__)

CA = "ca.pem"
CERTIFICATE = "cert.pem"
KEY = "key.pem"
SOON_DAYS = 14
"""Number of days before a certificate's expiry from which on warnings are logged: one when the certificate is read,
then one a day."""
_DAY_S = 86400.0
RETRY_S = 10.0
"""Seconds after which certificate files that could not be used are read again, even if they have not changed. For
example, the certificate's first day may have come since."""
_TRIES = 10
"""Maximum number of attempts to read files that change during the read."""
_SETTLE_S = 0.05
"""Seconds between two attempts to read files that change during the read."""

Stamp = tuple[tuple[int, int, int] | None, ...]
"""State of the certificate files in a folder, to detect changes: for each file its time of change, inode and size; None
= the file is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """Contents of a folder of certificates (certificate, private key and, if there is one, CA), in PEM form. They were
    checked when they were read.
    """

    ca: bytes | None
    certificate: bytes
    key: bytes = field(repr=False)
    context: ssl.SSLContext
    """TLS context of a server with these certificates."""
    expires: float
    """Time at which the certificate expires, in seconds since 1970."""


class CertificateFolder:
    """A folder with TLS certificates, which is read again when its files change. `current` returns the certificates for
    the next connection; any thread may use it.
    """

    def __init__(self, path: str, setting: str, role: Role | None) -> None:
        """Read the folder at `path`.

        setting: name of the setting that names the folder, for errors. role: role that the certificate must have;
        ca.pem must exist then. None = the certificate is of a server for users, which requires certificates of them
        only if ca.pem exists. Raises ConfigError with the wrong file and what to do.
        """
        self.role = role
        self._path = Path(path)
        self._setting = setting
        self._lock = threading.Lock()
        self.needs_client_certificates = role is not None or (self._path / CA).exists()
        """Whether callers must show a certificate. The value does not change while the process runs."""
        self._stamp, self._certificates = self._read_at_start()
        self._failure: str | None = None
        """Why the files with the state `_stamp` could not be used; None = they are in use."""
        self._retry_at_s = 0.0
        """Monotonic time from which files that could not be used are read again, in seconds."""
        self._warn_at_s = 0.0
        """Monotonic time, in seconds, from which another warning of the expiry is logged."""
        self._warn_if_soon()
        warn_if_open(self._path / KEY)

    @property
    def current(self) -> Certificates:
        """The certificates for the next connection. They are read again if a file has changed. While the new files are
        wrong, for example because only some are written yet, the previous certificates stay in use.
        """
        with self._lock:
            stamp = self._stamp_now()
            has_changed = stamp != self._stamp
            if has_changed or (self._failure is not None and time.monotonic() >= self._retry_at_s):
                self._read_again(stamp, has_changed)
            self._warn_if_soon()
            return self._certificates

    def _read_again(self, stamp: Stamp, has_changed: bool) -> None:
        try:
            found = self._read()
        except ConfigError as error:
            if has_changed or error.message != self._failure:
                log.warning("the certificates before stay in use: %s", error.message)
            self._stamp = stamp
            self._failure = error.message
            self._retry_at_s = time.monotonic() + RETRY_S
            return
        if found is None:  # they change now, and are read for the next connection: an event loop must not wait here
            return
        self._stamp, self._certificates = found
        self._failure = None
        self._warn_at_s = 0.0
        log.info("%s: the certificates in %s were replaced", self._setting, self._path)
        warn_if_open(self._path / KEY)

    def _warn_if_soon(self) -> None:
        num_days = (self._certificates.expires - time.time()) / _DAY_S
        if num_days < SOON_DAYS and time.monotonic() >= self._warn_at_s:
            self._warn_at_s = time.monotonic() + _DAY_S
            certificate = self._path / CERTIFICATE
            log.warning("%s: %s expires in %.1f days; renew it", self._setting, certificate, num_days)

    def _stamp_now(self) -> Stamp:
        return tuple(_stamp_of(self._path / name) for name in (CA, CERTIFICATE, KEY))

    def _read_at_start(self) -> tuple[Stamp, Certificates]:
        for _ in range(_TRIES):
            found = self._read()
            if found is not None:
                return found
            time.sleep(_SETTLE_S)
        raise ConfigError(f"{self._setting}: the files in {self._path} change all the time", param=self._setting)

    def _read(self) -> tuple[Stamp, Certificates] | None:
        # Returns None while the files are being replaced. Raises ConfigError for files that are wrong and do not
        # change.
        stamp = self._stamp_now()
        try:
            found = self._read_once()
        except ConfigError:
            if stamp == self._stamp_now():
                raise
            return None
        if stamp != self._stamp_now():
            return None
        return stamp, found

    def _read_once(self) -> Certificates:
        if not self._path.is_dir():
            raise self._wrong(f"{str(self._path)!r} is no folder; make one with `outrider certs`")
        ca = None
        if self.needs_client_certificates:
            ca = self._bytes(CA)
        elif (self._path / CA).exists():
            raise self._wrong(f"{self._path / CA} is new: restart to ask users for certificates, or take it away")
        certificate = self._bytes(CERTIFICATE)
        key = self._bytes(KEY)
        context = self._context(ca)
        return Certificates(ca, certificate, key, context, self._try_out(context, ca, certificate))

    def _bytes(self, name: str) -> bytes:
        try:
            return (self._path / name).read_bytes()
        except OSError as error:
            raise self._wrong(f"cannot read {self._path / name}: {error.strerror}") from None

    def _context(self, ca: bytes | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_pair(context)
        if ca is not None:
            self._trust(context, ca, CA)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load_pair(self, context: ssl.SSLContext) -> None:
        certificate = self._path / CERTIFICATE
        key = self._path / KEY
        try:
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except ssl.SSLError as error:
            if "MISMATCH" in (error.reason or ""):
                raise self._wrong(f"{key} is not the key of {certificate}; give the two that belong together") from None
            raise self._wrong(f"{certificate} or {key} is not in PEM form: {_reason(error)}") from None
        except _HasPassphraseError:
            raise self._wrong(f"{key} has a passphrase; give it without one, readable by this process alone") from None

    def _trust(self, context: ssl.SSLContext, pem: bytes, name: str) -> None:
        try:
            context.load_verify_locations(cadata=pem.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise self._wrong(f"{self._path / name} holds no certificates in PEM form: {_reason(error)}") from None

    def _try_out(self, context: ssl.SSLContext, ca: bytes | None, certificate: bytes) -> float:
        # A handshake of the certificate with itself fails as one with the other side would: it has expired, or is of
        # another CA. Returns its expiry in seconds since 1970.
        server = context
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        if ca is not None and self.role is not None:
            self._trust(client, ca, CA)
            self._load_pair(client)
        else:  # the CAs that users trust are not known here: the client trusts the certificate itself
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load_pair(server)
            client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._trust(client, certificate, CERTIFICATE)
        try:
            peer = _handshake(server, client)
        except ssl.SSLCertVerificationError as error:
            raise self._wrong(f"{self._path / CERTIFICATE}: {error.verify_message}; renew it{self._or_ca}") from None
        except ssl.SSLError as error:
            raise self._wrong(f"{self._path / CERTIFICATE} cannot be used: {_reason(error)}") from None
        names = set(peer.get("subjectAltName", ()))
        if self.role is not None and not {("URI", self.role.uri), ("DNS", self.role.host_name)} <= names:
            raise self._wrong(
                f"{self._path / CERTIFICATE} is not a {self.role.value}'s: it lacks the names {self.role.uri} and "
                f"{self.role.host_name}; give the folder that `outrider certs` made for this part"
            )
        return float(ssl.cert_time_to_seconds(peer["notAfter"]))

    @property
    def _or_ca(self) -> str:
        if self.role is None:
            return ""
        return f", or give the {CA} of who signed it"

    def _wrong(self, message: str) -> ConfigError:
        return ConfigError(f"{self._setting}: {message}", param=self._setting)


def role_certificates(tls_dir: str | None, role: Role, listens_on: str | None = None) -> CertificateFolder | None:
    """Return the certificates of a part of the system for its connections with other parts; None = `tls_dir` is None.

    tls_dir: the setting. role: the part. listens_on: host on which the part listens; if there is no TLS and other
    machines reach this host, a warning is logged. Raises ConfigError if the folder cannot be used.
    """
    if tls_dir is not None:
        return CertificateFolder(tls_dir, "tls_dir", role)
    if listens_on is not None:
        warn_of_open_port(listens_on)
    return None


def warn_of_open_port(host: str) -> None:
    """Log a warning if other machines can reach `host`, on which a part of the system listens without TLS."""
    if not is_loopback(host):
        log.warning(
            "listening on %s without tls_dir: nothing is encrypted, and whoever reaches the port may do what a "
            "gateway or a draft may",
            host,
        )


def public_certificates(public_tls_dir: str | None, listens_on: str) -> CertificateFolder | None:
    """Return a gateway's certificates for connections with users; None = `public_tls_dir` is None.

    listens_on: host on which the gateway listens; if there is no TLS and other machines reach this host, a warning is
    logged. Raises ConfigError if the folder cannot be used.
    """
    if public_tls_dir is not None:
        return CertificateFolder(public_tls_dir, "public_tls_dir", None)
    if not is_loopback(listens_on):
        log.warning("listening on %s without public_tls_dir: prompts, answers and keys travel in the clear", listens_on)
    return None


def server_credentials(folder: CertificateFolder) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server. Each new connection uses the certificates that the folder has when it
    begins.
    """

    def configure(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
        pair = (certificates.key, certificates.certificate)
        return grpc.ssl_server_certificate_configuration([pair], certificates.ca)

    used = folder.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # gRPC's threads call it for each connection; None = no change.
        nonlocal used
        current = folder.current
        if current is used:
            return None
        used = current
        return configure(current)

    fetcher: Any = fetch  # in gRPC's stubs it never returns None
    return grpc.dynamic_ssl_server_credentials(configure(used), fetcher, folder.needs_client_certificates)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return credentials for a gRPC channel. A channel keeps its credentials, so `Dialer` opens a new channel when the
    certificates change.
    """
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.certificate)


def http_context(folder: CertificateFolder) -> ssl.SSLContext:
    """Return a TLS context for an HTTP server. Each new connection uses the certificates that the folder has when it
    begins.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # without certificates: `on_hello` sets them
    context.verify_mode = folder.current.context.verify_mode

    def on_hello(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = folder.current.context

    context.sni_callback = on_hello
    return context


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    # In memory. Returns the server's certificate as `getpeercert` does. Raises ssl.SSLError.
    to_client = ssl.MemoryBIO()
    to_server = ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(8):  # more than the flights of a handshake
        for side in (client_side, server_side):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client_side.getpeercert() or {})


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


class _HasPassphraseError(Exception):
    pass


def _no_passphrase() -> str:
    # OpenSSL calls it for a key with a passphrase, and would otherwise read the terminal.
    raise _HasPassphraseError


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason
    return str(error)


class Dialer:
    """Opens the gRPC channel to another part of the system, and a new one after our certificates have changed, since a
    channel keeps the certificates with which it was opened.

    address: host:port of the other part. role: role that the other part's certificate must have. certificates: this
    process's certificates; None = no TLS.
    """

    def __init__(
        self, address: str, role: Role, max_message_bytes: int, certificates: CertificateFolder | None
    ) -> None:
        self._address = address
        self._role = role
        self._max_message_bytes = max_message_bytes
        self._folder = certificates
        self._used: Certificates | None = None
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self) -> grpc.aio.Channel:
        """Return the channel to use for the next call. If our certificates have changed, this is a new channel, and the
        previous one is closed, which ends its calls.
        """
        current = None
        if self._folder is not None:
            current = self._folder.current
        if self._channel is not None and current is self._used:
            return self._channel
        if self._channel is not None:
            closing = asyncio.create_task(self._channel.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._channel = self._open(current)
        self._used = current
        return self._channel

    def _open(self, certificates: Certificates | None) -> grpc.aio.Channel:
        options = client_options(self._address, self._max_message_bytes)
        address = f"dns:///{self._address}"  # so that an address from a peer is not read as a path or a scheme
        if certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        # The certificate is checked for the part's role, since addresses of workers change.
        name = ("grpc.ssl_target_name_override", self._role.host_name)
        return grpc.aio.secure_channel(address, channel_credentials(certificates), options=[*options, name])

    async def close(self) -> None:
        """Close the current channel, which ends its calls. Idempotent."""
        channel = self._channel
        self._channel = None
        if channel is not None:
            await channel.close(None)
        await asyncio.gather(*self._closing)
