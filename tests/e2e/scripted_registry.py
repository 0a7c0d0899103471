"""A registry whose membership the test writes. Use as `async with`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import registry_pb2_grpc
from outrider.wire.protocol import PROTOCOL
from outrider.wire.transport.rpc import server_options
from tests.stack import Process

STATES = {
    "starting": rpb.WORKER_STATE_STARTING,
    "serving": rpb.WORKER_STATE_SERVING,
    "draining": rpb.WORKER_STATE_DRAINING,
}


class ScriptedRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """One pool of targets, "chat", and one of drafts, "small"."""

    def __init__(self, model_name: str = "", epoch: int = 1) -> None:
        self.address = ""
        self.reports: list[rpb.GatewayReport] = []
        self._membership = rpb.WorkerList(
            epoch=epoch,
            protocol=PROTOCOL,
            pools=[
                rpb.Pool(name="chat", role=rpb.ROLE_TARGET, model_name=model_name),
                rpb.Pool(name="small", role=rpb.ROLE_DRAFT, serves=["chat"]),
            ],
        )
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "ScriptedRegistry":
        self._server = grpc.aio.server(options=server_options(1 << 20))
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(0)

    def send_membership(self, **states: tuple[Process, str]) -> None:
        """target_0=(process, "serving"): from now on these are the members."""
        membership = rpb.WorkerList(
            epoch=self._membership.epoch,
            version=self._membership.version + 1,
            protocol=PROTOCOL,
            pools=self._membership.pools,
        )
        for name, (process, state) in states.items():
            is_target = name.startswith("target")
            membership.workers.add(
                name=name,
                pool="chat" if is_target else "small",
                role=rpb.ROLE_TARGET if is_target else rpb.ROLE_DRAFT,
                state=STATES[state],
                address="" if state == "starting" else process.address,
            )
        self._membership = membership
        self._changed.set()
        self._changed = asyncio.Event()

    async def Join(self, reports: AsyncIterator[Any], context: Any) -> AsyncIterator[rpb.WorkerList]:
        reading = asyncio.create_task(self._read(reports))
        try:
            while True:
                changed = self._changed
                yield self._membership
                await changed.wait()
        finally:
            reading.cancel()

    async def _read(self, reports: AsyncIterator[rpb.GatewayReport]) -> None:
        async for report in reports:
            self.reports.append(report)
