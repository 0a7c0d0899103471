"""How commands that read a gateway over HTTP reach it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx

from outrider.client import AsyncClient, ConnectOptions
from outrider.client.address import PROBE_TIMEOUT_S
from outrider.client.connect import credentials_of
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.transport.address import join_host_port

HTTP_PORT: int = GatewayConfig.model_fields["port"].default


def gateway_url(text: str, connect: ConnectOptions) -> str:
    """Return the base URL of the gateway that somebody named, by its HTTP server or its gRPC server. Raises
    ConfigError.
    """
    url = url_of(text, credentials_of(connect) is not None)
    with contextlib.suppress(httpx.ConnectError):
        try:
            # Only whether it speaks HTTP is looked at: whom to trust is decided when it is read.
            httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False)
        except httpx.HTTPError:
            return asyncio.run(_http_of(httpx.URL(url), connect)) or url
    return url


async def _http_of(url: httpx.URL, connect: ConnectOptions) -> str | None:
    """Return the URL of the HTTP server of a gateway whose gRPC server is at `url`; None where that is none."""
    address = join_host_port(url.host, url.port or HTTP_PORT)
    try:
        async with AsyncClient(address, timeout_s=PROBE_TIMEOUT_S, retries=0, **connect) as client:
            port = await client.http_port()
    except OutriderError:
        return None
    return str(url.copy_with(port=port)) if port else None


def url_of(text: str, with_tls: bool) -> str:
    """Return the base URL; what a person types may leave out scheme and port, and end in /v1. Raises ConfigError."""
    has_scheme = "://" in text
    scheme = "https" if with_tls else "http"
    url = text if has_scheme else f"{scheme}://{text}"
    try:
        scheme, host = httpx.URL(url).scheme, httpx.URL(url).host
        if host and not has_scheme and httpx.URL(url).port is None:
            url = str(httpx.URL(url).copy_with(port=HTTP_PORT))
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
