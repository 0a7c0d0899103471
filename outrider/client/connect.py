"""How a client reaches its gateway: in the clear or by TLS, whom it trusts, and who it says it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict

import grpc

from outrider.wire.errors import ConfigError

KEY_VARIABLE = "OUTRIDER_API_KEY"

MIN_PING_INTERVAL_S = 1.0
"""A gateway's least."""
MAX_PING_INTERVAL_S = 86400.0
"""A day; gRPC counts milliseconds in 31 bits."""
PING_INTERVAL_S = 330.0
"""gRPC's servers end a connection that pings more than once in 300 s without data, unless they are told otherwise."""

PathLike = str | os.PathLike[str]


class ConnectOptions(TypedDict, total=False):
    """Arguments of `Client` and `AsyncClient`, all optional."""

    tls: bool | grpc.ChannelCredentials
    """True: TLS, trusting the system's roots or `tls_ca`. Credentials of your own replace the other three."""
    tls_ca: PathLike | None
    """PEM file of the CAs to trust; implies TLS."""
    tls_cert: PathLike | None
    """PEM file with the certificate to show to a gateway that asks for one; implies TLS."""
    tls_key: PathLike | None
    """PEM file with the key of `tls_cert`."""
    api_key: str | None
    """API key sent with every call; absent = that of OUTRIDER_API_KEY, where it is set."""
    ping_interval_s: float
    """Seconds between pings of the connection while a call runs, at least 1; absent = 330, which whatever ends gRPC in
    between allows. Straight to a gateway, a smaller one notices sooner that it hangs or is cut off."""


def credentials_of(options: ConnectOptions) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel, or None for one without TLS. Raises ConfigError naming the argument."""
    tls = options.get("tls", False)
    ca, certificate, key = (options.get("tls_ca"), options.get("tls_cert"), options.get("tls_key"))
    if not isinstance(tls, bool):
        if ca or certificate or key:
            raise ConfigError("tls is credentials of your own: put CA and certificate into them", param="tls")
        return tls
    if (certificate is None) != (key is None):
        missing, given = ("tls_key", "tls_cert") if key is None else ("tls_cert", "tls_key")
        raise ConfigError(f"{missing} is missing: {given} needs it", param=missing)
    if not (tls or ca or certificate):
        return None
    return grpc.ssl_channel_credentials(
        _read("tls_ca", ca, "CERTIFICATE"),
        _read("tls_key", key, "PRIVATE KEY"),
        _read("tls_cert", certificate, "CERTIFICATE"),
    )


def metadata_of(options: ConnectOptions) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call carries. Raises ConfigError for a key that cannot be sent."""
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
    """Return the channel's options for pings, which a gateway sends from its side, too. Raises ConfigError for more of
    them than a gateway allows.
    """
    interval_s = options.get("ping_interval_s", PING_INTERVAL_S)
    if not MIN_PING_INTERVAL_S <= interval_s <= MAX_PING_INTERVAL_S:
        limits = f"from {MIN_PING_INTERVAL_S:g} to {MAX_PING_INTERVAL_S:g}"
        raise ConfigError(f"ping_interval_s is {interval_s}, must be {limits}", param="ping_interval_s")
    return [("grpc.keepalive_time_ms", round(1000 * interval_s)), ("grpc.keepalive_permit_without_calls", 0)]


def _read(name: str, path: PathLike | None, holds: str) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error.strerror}", param=name) from None
    if f"{holds}-----".encode() not in content:
        raise ConfigError(f"{name} is {str(path)!r}, which holds no {holds.lower()} in PEM form", param=name)
    return content
