"""The gateway's end of a worker, against a server that does as the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.workers.connection import Connection
from gateway.workers.links import WorkerLink
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import IncompatiblePair, WorkerFault, WorkerLost
from outrider.wire.protocol import PROTOCOL
from tests.service.front_door import grpc_server
from tests.waiting import until


class SilentTarget(target_pb2_grpc.TargetServiceServicer):
    """Takes everything and answers nothing."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.info = pb.WorkerInfo(epoch=7, model_id="silent", protocol=PROTOCOL)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return self.info

    async def Control(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.num_streams += 1
        async for _ in requests:
            pass


async def take_any(info: pb.WorkerInfo, link: WorkerLink) -> None:
    """Accept every worker."""


@asynccontextmanager
async def linked(
    target: SilentTarget, silence_s: tuple[float, float] = (4.0, 30.0), **told: Any
) -> AsyncIterator[WorkerLink]:
    """told: who is told, in place of nobody: accept, on_change, on_info."""
    nobody = {"accept": take_any, "on_change": lambda before, after: None, "on_info": lambda info: None}
    add = partial(target_pb2_grpc.add_TargetServiceServicer_to_server, target)
    async with grpc_server(add) as address:
        link = WorkerLink(
            "target",
            address,
            max_message_bytes=1 << 20,
            silence_s=silence_s,
            count_bytes=lambda num_bytes: None,
            **(nobody | told),
        )
        try:
            yield link
        finally:
            await link.close()


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
async def test_a_worker_of_another_protocol_is_left_unused(protocol: int) -> None:
    target = SilentTarget()
    target.info = pb.WorkerInfo(epoch=7, model_id="other", version="9.9.9", protocol=protocol)
    async with linked(target) as link:
        await until(lambda: link.refused)
        assert link.refused is not None and link.refused.message == (
            f"the target other (version 9.9.9) speaks protocol {protocol}, this gateway {PROTOCOL}; "
            "install the same version of Outrider for both"
        )
        assert link.connection is None and target.num_streams == 0


async def test_readyz_is_told_of_a_fault_of_ours_and_the_worker_is_used_once_it_is_over() -> None:
    target = SilentTarget()
    async with linked(target) as link:
        accept, link._accept = link._accept, AsyncMock(side_effect=ZeroDivisionError("what the worker sent"))
        await until(lambda: link.refused)
        assert isinstance(link.refused, WorkerFault)
        assert link.refused.message == "the connection to it failed (ZeroDivisionError); the gateway's log says where"
        link._accept = accept
        await until(lambda: link.connection)
        assert link.refused is None


async def test_a_worker_that_makes_no_step_is_given_up() -> None:
    target = SilentTarget()
    target.info.num_steps = 1
    async with linked(target, silence_s=(0.4, 0.4)) as link:
        await until(lambda: link.connection)
        first = link.connection
        assert first is not None
        await asyncio.sleep(0.8)
        assert first.is_alive and not first.has_work, "it owes nothing"
        first.send(tpb.TargetRequest(), owes_step=True)
        assert first.has_work
        await until(lambda: not first.has_work)  # it rests: there was nothing to do
        target.info.current_step_us = 1
        first.send(tpb.TargetRequest(), owes_step=True)
        assert first.has_work
        target.info.num_steps = 2
        await until(lambda: not first.has_work)
        target.info.current_step_us = 1  # its engine is at it
        first.send(tpb.TargetRequest(), owes_step=True)
        await until(lambda: not first.is_alive)
        assert first.is_hung


async def test_a_link_outlives_its_streams_refusals_and_drains(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    target, changes, refusing = SilentTarget(), list[tuple[bool, bool]](), [False]

    async def accept(info: pb.WorkerInfo, link: WorkerLink) -> None:
        if refusing[0]:
            raise IncompatiblePair("scripted")

    def changed(before: Connection | None, after: Connection | None) -> None:
        changes.append((before is not None, after is not None))

    heard: list[pb.WorkerInfo] = []
    async with linked(target, accept=accept, on_change=changed, on_info=heard.append) as link:
        await until(lambda: link.connection)
        first = link.connection
        assert first is not None
        future = first.call(tpb.TargetRequest())
        replies = first.subscribe(tpb.TargetRequest())
        first.drop()
        await asyncio.wait({future}, timeout=5)
        assert isinstance(future.exception(), WorkerLost)
        with pytest.raises(WorkerLost):
            await replies.next()
        with pytest.raises(WorkerLost):
            await first.subscribe(tpb.TargetRequest()).next()
        await until(lambda: link.connection)
        assert link.connection is not first
        await until(lambda: target.num_streams == 2)

        target.info = pb.WorkerInfo(epoch=7, model_id="silent", is_draining=True, protocol=PROTOCOL)
        changes.clear()
        await until(lambda: (True, True) in changes)
        assert link.info is not None and link.connection is not None
        assert link.info.is_draining and heard[-1].is_draining and not heard[0].is_draining

        refusing[0] = True
        link.connection.drop()
        await until(lambda: link.refused)
        refusing[0] = False
        await asyncio.sleep(0.5)
        assert link.connection is None, "it is what it was: it is not looked at again"
        link.retry_now()
        await until(lambda: link.connection)
        assert link.refused is None
        backs = [each for each in caplog.messages if "is back" in each]
        assert backs == [f"the target at {link.address} is back"], "said once, for the loss that was said"
