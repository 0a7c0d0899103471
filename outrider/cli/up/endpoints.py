"""Addresses of a running system, as `Supervisor.start` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that was started with the system. A worker that Ray starts later, for a larger pool, is not listed."""

    name: str
    role: str
    """Role of the worker, "target" or "draft"."""
    address: str
    """host:port of the worker's gRPC server."""
    metrics: str | None
    """host:port of the worker's Prometheus endpoint; None = it has none."""
    memory: str
    """Memory that the worker takes, as text for the user."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Addresses of one running gateway."""

    http: str
    """host:port of the gateway's HTTP server."""
    grpc: str
    """host:port of the gateway's gRPC server."""
    url: str
    """URL of the gateway's HTTP server."""
    metrics_url: str
    """URL of the gateway's server that has /metrics, without a path: `http://127.0.0.1:9100`."""
    refused: Sequence[str] = ()
    """Workers that this gateway does not use, each as a text that names the worker and the reason."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a running system."""

    gateways: list[Gateway]
    workers: list[StartedWorker]
    registry: str | None
    """host:port of the launcher's registry, which lists the workers; None = the system runs without Ray."""
    chats: bool = False
    """Whether the first served model is made for chats, judged by its chat template."""

    @property
    def http(self) -> str:
        """host:port of the first gateway's HTTP server."""
        return self.gateways[0].http

    @property
    def grpc(self) -> str:
        """host:port of the first gateway's gRPC server."""
        return self.gateways[0].grpc

    def first(self, role: str) -> StartedWorker:
        """Return the first worker of a role ("target" or "draft"). Raises LookupError if there is none."""
        for worker in self.workers:
            if worker.role == role:
                return worker
        raise LookupError(f"no {role} was started")
