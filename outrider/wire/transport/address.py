"""Write host:port as gRPC, browsers and people do."""

from __future__ import annotations


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets, or its last group would read as the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
