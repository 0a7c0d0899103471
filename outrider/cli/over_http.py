"""Finds the HTTP server of a gateway, and makes TLS contexts for https. For `top` and `lab/tune.py`."""

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
"""HTTP port to use for an address without a port: the default of the gateway's setting `port`."""


def gateway_url(text: str, connect: ConnectOptions) -> str:
    """Return the base URL of a gateway's HTTP server. text: address of the gateway's HTTP server or of its gRPC server.
    connect: options of the connection.

    Raises ConfigError if `text` is not an address.
    """
    url = parse_url(text, credentials_of(connect) is not None)
    with contextlib.suppress(httpx.ConnectError):
        try:
            # This asks only whether it is an HTTP server: certificates are checked when it is read.
            httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False)
        except httpx.HTTPError:
            return asyncio.run(_http_of(httpx.URL(url), connect)) or url
    return url


async def _http_of(url: httpx.URL, connect: ConnectOptions) -> str | None:
    address = join_host_port(url.host, url.port or HTTP_PORT)
    try:
        async with AsyncClient(address, timeout_s=PROBE_TIMEOUT_S, retries=0, **connect) as client:
            port = await client.http_port()
    except OutriderError:
        return None
    if not port:
        return None
    return str(url.copy_with(port=port))


def parse_url(text: str, with_tls: bool) -> str:
    """Return the base URL for an address that a user typed. Scheme and port may be missing, and a /v1 at the end is
    dropped. with_tls: whether a missing scheme means https.

    Raises ConfigError if the text is not the address of an HTTP server.
    """
    has_scheme = "://" in text
    scheme = "https" if with_tls else "http"
    url = text
    if not has_scheme:
        url = f"{scheme}://{text}"
    try:
        scheme = httpx.URL(url).scheme
        host = httpx.URL(url).host
        if host and not has_scheme and httpx.URL(url).port is None:
            url = str(httpx.URL(url).copy_with(port=HTTP_PORT))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--gateway is {text!r}, which is no URL: {error}; say http://HOST:PORT") from None
    if scheme not in ("http", "https") or not host:
        raise ConfigError(f"--gateway is {text!r}, must look like http://HOST:PORT")
    if with_tls and scheme == "http":
        raise ConfigError(f"--gateway is {text!r} and TLS is asked for, which is https; say https://{url[7:]}")
    return url.rstrip("/").removesuffix("/v1")


def create_tls_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return a TLS context for https requests, made of PEM files: the CAs to trust (None = the system's), and the
    client's certificate with its key (None = no certificate). Raises ConfigError if a file cannot be used.
    """
    if (certificate is None) != (key is None):
        missing = "--tls-cert"
        given = "--tls-key"
        if key is None:
            missing, given = given, missing
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
