"""The gateway's end of a worker, against a server that does as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from gateway.workers.links import Connection, WorkerLink
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import IncompatiblePair, WorkerLost


class SilentTarget(target_pb2_grpc.TargetServiceServicer):
    """Takes everything and answers nothing."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.info = pb.WorkerInfo(epoch=7, model_id="silent")

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return self.info

    async def Control(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.num_streams += 1
        async for _ in requests:
            pass


async def until(check: Callable[[], object]) -> None:
    give_up = time.monotonic() + 10
    while not check():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def test_a_link_outlives_its_streams_refusals_and_drains() -> None:
    target, changes, refusing = SilentTarget(), list[tuple[bool, bool]](), [False]
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def accept(info: pb.WorkerInfo, link: WorkerLink) -> None:
        if refusing[0]:
            raise IncompatiblePair("scripted")

    def changed(before: Connection | None, after: Connection | None) -> None:
        changes.append((before is not None, after is not None))

    heard: list[pb.WorkerInfo] = []
    link = WorkerLink(
        "target",
        f"127.0.0.1:{port}",
        max_message_bytes=1 << 20,
        silence_s=(4.0, 30.0),
        accept=accept,
        count_bytes=lambda num_bytes: None,
        on_change=changed,
        on_info=heard.append,
    )
    try:
        await until(lambda: link.connection)
        first = link.connection
        assert first is not None
        future = first.call(tpb.TargetRequest())
        first.drop()
        await asyncio.wait({future}, timeout=5)
        assert isinstance(future.exception(), WorkerLost)
        await until(lambda: link.connection)
        assert link.connection is not first
        await until(lambda: target.num_streams == 2)

        target.info = pb.WorkerInfo(epoch=7, model_id="silent", draining=True)
        changes.clear()
        await until(lambda: (True, True) in changes)
        assert link.info is not None
        assert link.info.draining and heard[-1].draining and not heard[0].draining

        refusing[0] = True
        link.connection.drop()
        await until(lambda: link.refused)
        refusing[0] = False
        await asyncio.sleep(0.5)
        assert link.connection is None, "it is what it was: it is not looked at again"
        link.ask_again()
        await until(lambda: link.connection)
        assert link.refused is None
    finally:
        await link.close()
        await server.stop(0)
