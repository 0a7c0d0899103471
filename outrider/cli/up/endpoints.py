"""Addresses of a running system, as `Supervisor.start` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that was there at the start; with Ray there may be others later."""

    name: str
    role: str
    """target or draft."""
    address: str
    """host:port of its gRPC server."""
    metrics: str | None
    """host:port of its Prometheus endpoint; None where it has none."""
    memory: str
    """Memory that it takes, for people."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Addresses of a gateway."""

    http: str
    """host:port of its HTTP server."""
    grpc: str
    """host:port of its gRPC server."""
    url: str
    """URL of its HTTP server."""
    metrics_url: str
    """URL of the server that has /metrics."""
    refused: Sequence[str] = ()
    """Workers that it does not use, each with the reason."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a running system."""

    gateways: list[Gateway]
    workers: list[StartedWorker]
    registry: str | None
    """host:port of the launcher's registry; None without Ray."""
    chats: bool = False
    """Whether the first model's chat template shows that it is made for chats."""

    @property
    def http(self) -> str:
        """host:port of the first gateway's HTTP server."""
        return self.gateways[0].http

    @property
    def grpc(self) -> str:
        """host:port of the first gateway's gRPC server."""
        return self.gateways[0].grpc

    def first(self, role: str) -> StartedWorker:
        """Return the first worker of a role, in a pair the only one. Raises LookupError where there is none."""
        for worker in self.workers:
            if worker.role == role:
                return worker
        raise LookupError(f"no {role} was started")
