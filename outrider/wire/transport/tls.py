"""Certificates: read from a folder, checked, and read again when they change. For gRPC and HTTP, servers and clients.

A folder holds cert.pem (the certificate, then those between it and its CA), key.pem (its private key, without a
passphrase) and ca.pem (the CAs whose certificates the other side may show). Whether a channel to another part has
certificates is decided here alone, in `Dialer`.
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

CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
SOON_DAYS = 14
"""Days to live below which a certificate is warned of, when it is read and then once a day."""
_DAY_S = 86400.0
RETRY_S = 10.0
"""Seconds after which files that could not be used are tried again, though unchanged: they may be valid from a later
time on."""
_TRIES, _SETTLE_S = 10, 0.05

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """What a folder held when it was last right. PEM."""

    ca: bytes | None
    certificate: bytes
    key: bytes = field(repr=False)
    context: ssl.SSLContext
    """A server's, with these in it."""
    expires: float
    """Of the certificate: seconds since 1970."""


class CertificateFolder:
    """Holds a folder's certificates. `current`, for the next connection, may be asked on any thread."""

    def __init__(self, path: str, setting: str, role: Role | None) -> None:
        """Read the folder at `path`.

        role: of the part whose certificate it is; ca.pem must be there then. None: a server that users call, which
        asks them for certificates when there is a ca.pem. setting: named in errors. Raises ConfigError naming the file
        and what to do.
        """
        self.role = role
        self._path = Path(path)
        self._setting = setting
        self._lock = threading.Lock()
        self.asks_for_certificates = role is not None or (self._path / CA).exists()
        """Decided at the start: to begin or to end it takes another one."""
        self._stamp, self._certificates = self._read_at_start()
        self._failure: str | None = None
        """Why the files of `_stamp` are not those in use."""
        self._retry_at_s = self._warn_at_s = 0.0
        """Of time.monotonic()."""
        self._warn_if_soon()
        warn_if_open(self._path / KEY)

    @property
    def current(self) -> Certificates:
        """Return the certificates, read anew when a file has changed, or the last right ones while they are not right.

        A folder is often written file by file.
        """
        with self._lock:
            stamp = self._stamp_now()
            changed = stamp != self._stamp
            if changed or (self._failure is not None and time.monotonic() >= self._retry_at_s):
                self._read_again(stamp, changed)
            self._warn_if_soon()
            return self._certificates

    def _read_again(self, stamp: Stamp, changed: bool) -> None:
        try:
            read = self._read()
        except ConfigError as error:
            if changed or error.message != self._failure:
                log.warning("the certificates before stay in use: %s", error.message)
            self._stamp, self._failure = stamp, error.message
            self._retry_at_s = time.monotonic() + RETRY_S
            return
        if read is not None:  # else the next connection looks again: nobody waits here, on an event loop
            (self._stamp, self._certificates), self._failure, self._warn_at_s = read, None, 0.0
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
            read = self._read()
            if read is not None:
                return read
            time.sleep(_SETTLE_S)
        raise ConfigError(f"{self._setting}: the files in {self._path} change all the time", param=self._setting)

    def _read(self) -> tuple[Stamp, Certificates] | None:
        """None while the files are being replaced. Raises ConfigError for files that stay as they are and are wrong."""
        stamp = self._stamp_now()
        try:
            found = self._read_once()
        except ConfigError:
            if stamp == self._stamp_now():
                raise
            return None
        return (stamp, found) if stamp == self._stamp_now() else None

    def _read_once(self) -> Certificates:
        if not self._path.is_dir():
            raise self._wrong(f"{str(self._path)!r} is no folder; make one with `outrider certs`")
        ca = self._bytes(CA) if self.asks_for_certificates else None
        if ca is None and (self._path / CA).exists():
            raise self._wrong(f"{self._path / CA} is new: restart to ask users for certificates, or take it away")
        certificate, key = self._bytes(CERTIFICATE), self._bytes(KEY)
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
        paths = (self._path / CERTIFICATE, self._path / KEY)
        try:
            context.load_cert_chain(*paths, password=_no_passphrase)
        except ssl.SSLError as error:
            if "MISMATCH" in (error.reason or ""):
                raise self._wrong(
                    f"{paths[1]} is not the key of {paths[0]}; give the two that belong together"
                ) from None
            raise self._wrong(f"{paths[0]} or {paths[1]} is not in PEM form: {_reason(error)}") from None
        except _HasPassphraseError:
            raise self._wrong(
                f"{paths[1]} has a passphrase; give it without one, readable by this process alone"
            ) from None

    def _trust(self, context: ssl.SSLContext, pem: bytes, name: str) -> None:
        try:
            context.load_verify_locations(cadata=pem.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise self._wrong(f"{self._path / name} holds no certificates in PEM form: {_reason(error)}") from None

    def _try_out(self, context: ssl.SSLContext, ca: bytes | None, certificate: bytes) -> float:
        """A handshake with itself finds what the other side would: that it has expired, or is of another CA. Returns
        when it will have expired, in seconds since 1970.
        """
        server, client = context, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        if ca is not None and self.role is not None:
            self._trust(client, ca, CA)
            self._load_pair(client)
        else:  # whom users trust is not known here, so it vouches for itself
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load_pair(server)
            client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._trust(client, certificate, CERTIFICATE)
        try:
            shown = _handshake(server, client)
        except ssl.SSLCertVerificationError as error:
            raise self._wrong(f"{self._path / CERTIFICATE}: {error.verify_message}; renew it{self._or_ca}") from None
        except ssl.SSLError as error:
            raise self._wrong(f"{self._path / CERTIFICATE} cannot be used: {_reason(error)}") from None
        names = set(shown.get("subjectAltName", ()))
        if self.role is not None and not {("URI", self.role.uri), ("DNS", self.role.host_name)} <= names:
            raise self._wrong(
                f"{self._path / CERTIFICATE} is not a {self.role.value}'s: it lacks the names {self.role.uri} and "
                f"{self.role.host_name}; give the folder that `outrider certs` made for this part"
            )
        return float(ssl.cert_time_to_seconds(shown["notAfter"]))

    @property
    def _or_ca(self) -> str:
        return "" if self.role is None else f", or give the {CA} of who signed it"

    def _wrong(self, message: str) -> ConfigError:
        return ConfigError(f"{self._setting}: {message}", param=self._setting)


def part_certificates(tls_dir: str | None, role: Role, listens_on: str | None = None) -> CertificateFolder | None:
    """Return a part's certificates for its connections with others; None without a folder.

    They are open then, of which is warned where `listens_on` is beyond this machine. Raises ConfigError.
    """
    if tls_dir is not None:
        return CertificateFolder(tls_dir, "tls_dir", role)
    if listens_on is not None:
        warn_of_open_port(listens_on)
    return None


def warn_of_open_port(host: str) -> None:
    """Warn if `host`, where a part listens without certificates, is beyond this machine."""
    if not is_loopback(host):
        log.warning(
            "listening on %s without tls_dir: nothing is encrypted, and whoever reaches the port may do what a "
            "gateway or a draft may",
            host,
        )


def public_certificates(public_tls_dir: str | None, listens_on: str) -> CertificateFolder | None:
    """Return a gateway's certificates for its users; else as `part_certificates`."""
    if public_tls_dir is not None:
        return CertificateFolder(public_tls_dir, "public_tls_dir", None)
    if not is_loopback(listens_on):
        log.warning("listening on %s without public_tls_dir: prompts, answers and keys travel in the clear", listens_on)
    return None


def server_credentials(folder: CertificateFolder) -> grpc.ServerCredentials:
    """Return a server's credentials: each connection is met with the folder's certificates of its time."""

    def configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.ca)

    served = folder.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at each connection; None: as before."""
        nonlocal served
        current = folder.current
        if current is served:
            return None
        served = current
        return configuration(current)

    fetcher: Any = fetch  # the stubs do not know that it may return None
    return grpc.dynamic_ssl_server_credentials(configuration(served), fetcher, folder.asks_for_certificates)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return a channel's credentials. A channel keeps what it was made with: see `Dialer` for those that live long."""
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.certificate)


def http_context(folder: CertificateFolder) -> ssl.SSLContext:
    """Return an HTTP server's context: each connection is met with the folder's certificates of its time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # holds none itself: they are chosen at the first message
    context.verify_mode = folder.current.context.verify_mode

    def on_hello(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = folder.current.context

    context.sni_callback = on_hello
    return context


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Shake hands in memory. Return the server's certificate as `getpeercert` does. Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(8):  # more flights than a handshake has
        for side in (calling, answering):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(calling.getpeercert() or {})


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


class _HasPassphraseError(Exception):
    pass


def _no_passphrase() -> str:
    """Asked for by OpenSSL, which would else ask the terminal."""
    raise _HasPassphraseError


def _reason(error: Exception) -> str:
    return (error.reason or str(error)) if isinstance(error, ssl.SSLError) else str(error)


class Dialer:
    """The channel to one part; another one once our certificates have changed, since a channel keeps its own."""

    def __init__(
        self, address: str, role: Role, max_message_bytes: int, certificates: CertificateFolder | None
    ) -> None:
        """Prepare to dial `address`. role: who must answer there, when there are certificates."""
        self._address = address
        self._role = role
        self._max_message_bytes = max_message_bytes
        self._folder = certificates
        self._used: Certificates | None = None
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self) -> grpc.aio.Channel:
        """Return the channel for the next connection. One of before is closed when this is another; its calls end."""
        current = None if self._folder is None else self._folder.current
        if self._channel is None or current is not self._used:
            if self._channel is not None:
                closing = asyncio.create_task(self._channel.close(None))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._channel, self._used = self._open(current), current
        return self._channel

    def _open(self, certificates: Certificates | None) -> grpc.aio.Channel:
        options = client_options(self._address, self._max_message_bytes)
        address = f"dns:///{self._address}"  # an address that was sent to us must not be read as a path or a scheme
        if certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        # Addresses of workers come and go; what is checked is that the certificate is of the part that we want.
        name = ("grpc.ssl_target_name_override", self._role.host_name)
        return grpc.aio.secure_channel(address, channel_credentials(certificates), options=[*options, name])

    async def close(self) -> None:
        """Ends its calls. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        await asyncio.gather(*self._closing)
