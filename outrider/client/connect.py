"""How a client connects to its gateway: TLS, the certificates it trusts, its API key, and pings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict

import grpc

from outrider.wire.errors import ConfigError

KEY_VARIABLE = "OUTRIDER_API_KEY"
"""Environment variable from which the API key is read if the argument `api_key` is not given."""

MIN_PING_INTERVAL_S = 1.0
"""Smallest allowed `ping_interval_s`, in seconds. A gateway ends a connection that pings more often."""
MAX_PING_INTERVAL_S = 86400.0
"""Largest allowed `ping_interval_s`, in seconds (a day). gRPC holds the interval as a 32-bit number of milliseconds."""
PING_INTERVAL_S = 330.0
"""Default of `ping_interval_s`, in seconds. With default settings, gRPC's servers and proxies end a connection that
pings more than once in 300 s without data."""

PathLike = str | os.PathLike[str]


class ConnectOptions(TypedDict, total=False):
    """Keyword arguments of `Client` and `AsyncClient` that configure the connection, all optional."""

    tls: bool | grpc.ChannelCredentials
    """True = TLS that trusts `tls_ca` or, without it, the system's root certificates. False = no TLS unless `tls_ca` or
    `tls_cert` is given. gRPC credentials of your own replace `tls_ca`, `tls_cert` and `tls_key`."""
    tls_ca: PathLike | None
    """PEM file of the certificate authorities to trust; implies TLS."""
    tls_cert: PathLike | None
    """PEM file with the client's certificate, for a gateway that requires one; implies TLS."""
    tls_key: PathLike | None
    """PEM file with the private key of `tls_cert`."""
    api_key: str | None
    """API key sent with every call; absent = the value of OUTRIDER_API_KEY, if set."""
    ping_interval_s: float
    """Seconds between two gRPC keepalive pings while a call runs, 1 to 86400; absent = 330, which proxies allow too.
    Where no proxy is in between, a smaller value detects sooner that the gateway hangs or cannot be reached."""


def credentials_of(options: ConnectOptions) -> grpc.ChannelCredentials | None:
    """Return the gRPC credentials for a channel with these options; None = the channel uses no TLS.

    Raises ConfigError naming the argument that is wrong.
    """
    tls = options.get("tls", False)
    ca = options.get("tls_ca")
    certificate = options.get("tls_cert")
    key = options.get("tls_key")
    if not isinstance(tls, bool):
        if ca or certificate or key:
            raise ConfigError("tls is credentials of your own: put CA and certificate into them", param="tls")
        return tls
    if certificate is not None and key is None:
        raise ConfigError("tls_key is missing: tls_cert needs it", param="tls_key")
    if key is not None and certificate is None:
        raise ConfigError("tls_cert is missing: tls_key needs it", param="tls_cert")
    if not (tls or ca or certificate):
        return None
    return grpc.ssl_channel_credentials(
        _read("tls_ca", ca, "CERTIFICATE"),
        _read("tls_key", key, "PRIVATE KEY"),
        _read("tls_cert", certificate, "CERTIFICATE"),
    )


def metadata_of(options: ConnectOptions) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata to send with every call: the API key, or nothing where none is given.

    Raises ConfigError for a key that cannot be sent.
    """
    key = options.get("api_key") or os.environ.get(KEY_VARIABLE)
    if not key:
        return ()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the API key of {len(key)} characters has blanks or others that no key has; is more than the key in it?",
            param="api_key",
        )
    return (("authorization", f"Bearer {key}"),)


def keepalive_of(options: ConnectOptions) -> list[tuple[str, int]]:
    """Return the gRPC channel options that set `ping_interval_s`. Raises ConfigError for an interval out of range."""
    interval_s = options.get("ping_interval_s", PING_INTERVAL_S)
    if not MIN_PING_INTERVAL_S <= interval_s <= MAX_PING_INTERVAL_S:
        limits = f"from {MIN_PING_INTERVAL_S:g} to {MAX_PING_INTERVAL_S:g}"
        raise ConfigError(f"ping_interval_s is {interval_s}, must be {limits}", param="ping_interval_s")
    return [("grpc.keepalive_time_ms", round(1000 * interval_s)), ("grpc.keepalive_permit_without_calls", 0)]


def _read(name: str, path: PathLike | None, label: str) -> bytes | None:
    # label: of the PEM block that the file must have, such as CERTIFICATE
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error.strerror}", param=name) from None
    if f"{label}-----".encode() not in content:
        raise ConfigError(f"{name} is {str(path)!r}, which holds no {label.lower()} in PEM form", param=name)
    return content
