"""gRPC's health service, `grpc.health.v1`: one state for all services of a server. `serving` adds it.

grpcio-health-checking has one, too, whose watchers hold a lock while they write: one that reads nothing would keep the
state from changing for everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """Answers Check and Watch. One event loop, so no lock."""

    def __init__(self, services: Collection[str]) -> None:
        """`services`: full names, beside "", which stands for the server."""
        self._services = frozenset(("", *services))
        self._is_serving = True
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        """Change the state of all services; watchers learn it at once."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {request.service!r}")
        return self._state_of(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Send the state now, and again whenever it is another."""
        sent: health_pb2.HealthCheckResponse | None = None
        while True:
            changed, state = self._changed, self._state_of(request.service)
            if state != sent:
                await context.write(state)
                sent = state
            await changed.wait()

    def _state_of(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return Status(status=Status.SERVICE_UNKNOWN)
        return Status(status=Status.SERVING if self._is_serving else Status.NOT_SERVING)
