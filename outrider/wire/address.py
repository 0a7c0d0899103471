"""host:port as gRPC, browsers and people write it."""

from __future__ import annotations


def join_host_port(host: str, port: int) -> str:
    """An IPv6 address goes into brackets, or its last group would read as the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
