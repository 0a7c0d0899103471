"""How commands that read a gateway over HTTP reach it."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from outrider.wire.errors import ConfigError


def url_of(text: str, with_tls: bool) -> str:
    """Return the base URL; what a person types may leave out the scheme and end in /v1. Raises ConfigError."""
    url = text if "://" in text else f"{'https' if with_tls else 'http'}://{text}"
    try:
        scheme, host = httpx.URL(url).scheme, httpx.URL(url).host
    except httpx.InvalidURL as error:
        raise ConfigError(f"--gateway is {text!r}, which is no URL: {error}; say http://HOST:PORT") from None
    if scheme not in ("http", "https") or not host:
        raise ConfigError(f"--gateway is {text!r}, must look like http://HOST:PORT")
    if with_tls and scheme == "http":
        raise ConfigError(f"--gateway is {text!r} and TLS is asked for, which is https; say https://{url[7:]}")
    return url.rstrip("/").removesuffix("/v1")


def trust_of(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return whom to trust over https, and who to say that one is. Raises ConfigError naming the file."""
    if (certificate is None) != (key is None):
        missing, given = ("--tls-key", "--tls-cert") if key is None else ("--tls-cert", "--tls-key")
        raise ConfigError(f"{missing} is missing: {given} needs it")
    try:
        trust = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            trust.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"--tls-ca {ca}, --tls-cert {certificate} and --tls-key {key} cannot be used: {error.strerror or error}"
        ) from None
    return trust
