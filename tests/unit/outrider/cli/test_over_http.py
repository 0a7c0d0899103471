"""Addresses that a user types for a gateway's HTTP server."""

from pathlib import Path

import pytest

from outrider.cli.over_http import create_tls_context, gateway_url, parse_url
from outrider.client import ConnectOptions
from outrider.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "with_tls", "url"),
    [
        ("host", False, "http://host:8000"),
        ("host:9", False, "http://host:9"),
        ("host:9", True, "https://host:9"),
        ("[::1]", False, "http://[::1]:8000"),
        ("https://host/v1/", True, "https://host"),
        ("http://host/outrider/v1", False, "http://host/outrider"),
    ],
)
def test_what_is_missing_is_added(text: str, with_tls: bool, url: str) -> None:
    assert parse_url(text, with_tls) == url


@pytest.mark.parametrize(
    ("text", "with_tls", "message"),
    [
        ("host:port", False, "is 'host:port', which is no URL"),
        ("", False, "is '', must look like http://HOST:PORT"),
        ("ftp://host", False, "is 'ftp://host', must look like"),
        ("http://host:9", True, "TLS is asked for, which is https; say https://host:9"),
    ],
)
def test_what_is_no_address_is_refused(text: str, with_tls: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_url(text, with_tls)


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.pem").touch()
    with pytest.raises(ConfigError, match="--tls-key is missing: --tls-cert needs it"):
        create_tls_context(None, tmp_path / "a.pem", None)
    with pytest.raises(ConfigError, match="--tls-cert is missing: --tls-key needs it"):
        create_tls_context(None, None, tmp_path / "a.pem")
    with pytest.raises(ConfigError, match=r"--tls-ca .*/none\.pem, .* cannot be used: No such file"):
        create_tls_context(tmp_path / "none.pem", None, None)


def test_no_server_leaves_the_address_as_it_is() -> None:
    assert gateway_url("127.0.0.1:1", ConnectOptions()) == "http://127.0.0.1:1"
