"""Proxies between processes."""

import pytest

from outrider.wire.transport.rpc import proxy_note


def test_a_proxy_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_note("gpu-1:80") == ""
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    assert proxy_note("gpu-1:80").startswith("; http_proxy names a proxy")
    assert proxy_note("localhost:80") == proxy_note("ipv4:127.0.0.1:80") == ""
    monkeypatch.setenv("grpc_proxy", "")
    assert proxy_note("gpu-1:80") == "", "gRPC takes an empty one for none"
