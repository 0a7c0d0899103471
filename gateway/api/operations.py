"""What an operator's machines read of a gateway: metrics, where the workers' are, whether it lives, whether it serves.

On the HTTP port beside the API, or on a port of their own (`metrics_port`), which nobody else needs to reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api.callers import CallerCheck, CallerPolicy
from gateway.api.http_io import JsonResponse
from gateway.api.usage import Json
from gateway.generation import Generator
from gateway.workers.member import Member
from outrider.wire.transport.address import join_host_port
from outrider.wire.transport.health_servicer import Health

HEALTH_INTERVAL_S = 0.5
"""Seconds that gRPC's health may be behind /readyz."""
EVERYWHERE = ("0.0.0.0", "[::]")
"""Where a worker listens that was told no host: nothing that anybody could connect to."""


async def follow_readiness(health: Health, generator: Generator) -> None:
    """Keep gRPC's health as /readyz is, until cancelled."""
    while True:
        health.set_serving(generator.ready() is None)
        await asyncio.sleep(HEALTH_INTERVAL_S)


def target_groups(members: Iterable[Member]) -> list[Json]:
    """Return where the metrics of all workers are that have said so, whether they are connected now or not, in the form
    of Prometheus' HTTP service discovery.
    """
    groups: list[Json] = []
    for member in members:
        spec, info = member.spec, member.link.info
        address = spec.metrics_address or ("" if info is None else info.metrics_address)
        if address:
            labels = {"role": spec.role, "pool": spec.pool, "member": spec.name}
            groups.append({"targets": [reachable(address, spec.address)], "labels": labels})
    return groups


def reachable(metrics_address: str, worker_address: str) -> str:
    """A worker that listens on every address is asked for its metrics where its gRPC is."""
    host, _, port = metrics_address.rpartition(":")
    if host not in EVERYWHERE:
        return metrics_address
    return join_host_port(worker_address.rpartition(":")[0].strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class Operations:
    """The endpoints that no user needs."""

    generator: Generator
    registry: CollectorRegistry
    members: Callable[[], Iterable[Member]]
    """Return the workers as they are now, for /sd."""

    def app(self, policy: CallerPolicy | None) -> Starlette:
        """Return the application of a port of their own. policy: which callers it refuses; None = none."""
        endpoints = {
            "/metrics": self.metrics,
            "/sd": self.discovery,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
        }
        checks = [] if policy is None else [Middleware(CallerCheck, policy=policy)]
        return Starlette(routes=[Route(path, endpoint) for path, endpoint in endpoints.items()], middleware=checks)

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus series."""
        return Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def discovery(self, request: Request) -> Response:
        """Tell Prometheus' http_sd_configs where the workers' metrics are."""
        return JsonResponse(target_groups(self.members()))

    async def healthz(self, request: Request) -> Response:
        """Say that the process lives."""
        return JsonResponse({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Say whether a request would be served now, and which workers are not used."""
        reason = self.generator.ready()
        said = {"ready": reason is None, "reason": reason, "refused": list(self.generator.refusals())}
        return JsonResponse(said, 200 if reason is None else 503)
