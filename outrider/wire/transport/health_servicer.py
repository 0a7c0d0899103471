"""gRPC's health service, `grpc.health.v1`, with one state for all services of a server. `serving` adds it to servers.

The servicer of the package grpcio-health-checking holds a lock while it writes to a watcher. A watcher that does not
read would therefore block changes of the state for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """Servicer of the methods Check and Watch of gRPC's health service. It has no lock, so use it on one event loop
    only.
    """

    def __init__(self, services: Collection[str]) -> None:
        """services: full names of the server's services. The empty name, which means the whole server, is added."""
        self._services = frozenset(("", *services))
        self._is_serving = True
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        """Set the state of all services to SERVING (True) or NOT_SERVING (False), and report it to all open
        Watch calls.
        """
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {request.service!r}")
        return self._state_of(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Serve a Watch call: send the state of a service now, and again whenever it changes."""
        sent: health_pb2.HealthCheckResponse | None = None
        while True:
            changed = self._changed
            state = self._state_of(request.service)
            if state != sent:
                await context.write(state)
                sent = state
            await changed.wait()

    def _state_of(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return Status(status=Status.SERVICE_UNKNOWN)
        if not self._is_serving:
            return Status(status=Status.NOT_SERVING)
        return Status(status=Status.SERVING)
