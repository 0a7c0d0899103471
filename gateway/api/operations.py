"""The endpoints for operators: metrics, addresses of the workers' metrics, liveness and readiness.

They are on the HTTP port of the API, or on a port of their own (`metrics_port`), which users need not reach.
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
from outrider.wire.transport.health_servicer import HealthServicer

HEALTH_INTERVAL_S = 0.5
"""Seconds between two updates of gRPC's health from the state of /readyz."""
WILDCARD_HOSTS = ("0.0.0.0", "[::]")
"""Hosts that stand for all addresses of a worker. No client can connect to them."""


async def follow_readiness(health: HealthServicer, generator: Generator) -> None:
    """Set gRPC's health status every HEALTH_INTERVAL_S: serving while /readyz answers 200. Runs until cancelled."""
    while True:
        health.set_serving(generator.ready() is None)
        await asyncio.sleep(HEALTH_INTERVAL_S)


def target_groups(members: Iterable[Member]) -> list[Json]:
    """Return the addresses of the workers' metrics, in the form of Prometheus' HTTP service discovery.

    All workers with metrics are included, connected or not.
    """
    groups: list[Json] = []
    for member in members:
        spec = member.spec
        address = _metrics_address(member)
        if address:
            labels = {"role": spec.role, "pool": spec.pool, "member": spec.name}
            groups.append({"targets": [reachable(address, spec.address)], "labels": labels})
    return groups


def _metrics_address(member: Member) -> str:
    if member.spec.metrics_address:
        return member.spec.metrics_address
    if member.link.info is None:
        return ""
    return member.link.info.metrics_address


def reachable(metrics_address: str, worker_address: str) -> str:
    """Return the address at which a worker's metrics can be fetched.

    It is `metrics_address`. If the host of `metrics_address` stands for all addresses, such as 0.0.0.0, the host of
    `worker_address` replaces it.
    """
    # 0.0.0.0:9090 of a worker at 10.0.0.7:50051: 10.0.0.7:9090
    host, _, port = metrics_address.rpartition(":")
    if host not in WILDCARD_HOSTS:
        return metrics_address
    return join_host_port(worker_address.rpartition(":")[0].strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class Operations:
    """The endpoints for operators: /metrics, /sd, /healthz and /readyz.

    The docstring of each endpoint's method is its description in /openapi.json.
    """

    generator: Generator
    registry: CollectorRegistry
    """Prometheus registry with the gateway's metrics."""
    members: Callable[[], Iterable[Member]]
    """Function that returns the workers as they are now. /sd, Prometheus' service discovery, lists them."""

    def app(self, policy: CallerPolicy | None) -> Starlette:
        """Return an application with the endpoints for operators alone, for the server at `metrics_port`.

        policy: decides which web pages may call; None for no check.
        """
        endpoints = {
            "/metrics": self.metrics,
            "/sd": self.discovery,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
        }
        routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
        checks = []
        if policy is not None:
            checks.append(Middleware(CallerCheck, policy=policy))
        return Starlette(routes=routes, middleware=checks)

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus series."""
        return Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def discovery(self, request: Request) -> Response:
        """Return the addresses of the workers' metrics, for Prometheus' http_sd_configs."""
        return JsonResponse(target_groups(self.members()))

    async def healthz(self, request: Request) -> Response:
        """Return that the process is alive."""
        return JsonResponse({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Return whether a request would be served now, and which workers are not used."""
        reason = self.generator.ready()
        state = {"ready": reason is None, "reason": reason, "refused": list(self.generator.refusals())}
        return JsonResponse(state, 200 if reason is None else 503)
