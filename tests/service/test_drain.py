"""SIGTERM at a worker: what runs goes on, nothing new begins, and it ends when nothing runs or the time is up."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.workers.links import IDLE_POLL_S
from outrider.engine.worker.worker_handle import NOTICE_S
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from tests.service.conftest import worker
from tests.service.control_client import ControlClient, eventually, open_slot, verify
from tests.stack import Process
from tests.waiting import wait_until

PROMPT = [5, 6, 7]


@contextlib.asynccontextmanager
async def asked_to_stop(process: Process):
    """A stream with a slot open at a worker that drains."""
    async with ControlClient(process.address, "target") as client:
        await client.opened(1, PROMPT)
        process.popen.terminate()
        await eventually(lambda info: info.is_draining, client)
        yield client


async def exit_code(process: Process) -> int:
    return await asyncio.to_thread(process.popen.wait, 20)


async def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new(target_folder: str) -> None:
    with worker("target_service", target_folder, "--drain-timeout-s", "60") as process:
        async with asked_to_stop(process) as client:
            reply = await client.ask(open_slot(2, PROMPT))
            assert reply.code == pb.WORKER_ERROR_CODE_DRAINING, reply
            status = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
            verdict = await client.ask(verify(1, len(PROMPT)))
            assert isinstance(verdict, tpb.Verdict), verdict
            client.tell(pb.CloseSlot(slot=1))
            assert await exit_code(process) == 0, "nothing runs any more: it does not wait for its time"


async def test_an_idle_worker_stays_until_its_gateways_have_seen_that_it_goes(target_folder: str) -> None:
    """Else it would be lost to them, which is told of as a fault."""
    with worker("target_service", target_folder, "--drain-timeout-s", "60") as process:
        async with ControlClient(process.address, "target") as client:
            await client.info()  # the stream, begun before it, is there, too
            process.popen.terminate()
            terminated_s = time.monotonic()
            was_draining = False
            with pytest.raises(grpc.aio.AioRpcError):
                while True:
                    was_draining = (await client.info()).is_draining
                    await asyncio.sleep(0.05)
            assert was_draining
            assert time.monotonic() > terminated_s + IDLE_POLL_S, "a gateway may have asked just before the signal"
            assert await exit_code(process) == 0


async def test_nobody_is_waited_for_who_is_not_there(target_folder: str) -> None:
    with worker("target_service", target_folder, "--drain-timeout-s", "60") as process:
        process.popen.terminate()
        started_s = time.monotonic()
        assert await exit_code(process) == 0
        assert time.monotonic() - started_s < NOTICE_S


async def test_drafts_that_deliver_are_told_and_not_waited_for(target_folder: str) -> None:
    """Cancelled by gRPC when its time is up, the stream might fail in the middle of a write, which is logged."""
    with worker("target_service", target_folder, "--drain-timeout-s", "60") as process:
        async with ControlClient(process.address, "target") as client:
            call = client.stub.Deliver()
            await call.write(tpb.DeliveryBatch())
            await call.initial_metadata()
            process.popen.terminate()
            assert await exit_code(process) == 0
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert await call.details() == "this worker is stopping; connect again"


async def test_what_runs_ends_when_the_time_is_up(target_folder: str) -> None:
    with worker("target_service", target_folder, "--drain-timeout-s", "1") as process:
        async with asked_to_stop(process):
            started_s = time.monotonic()
            assert await exit_code(process) == 0
            assert time.monotonic() - started_s < 10


async def test_a_second_signal_ends_it_at_once(target_folder: str) -> None:
    with worker("target_service", target_folder, "--drain-timeout-s", "60") as process:
        async with asked_to_stop(process):
            process.popen.send_signal(signal.SIGHUP)
            assert await exit_code(process) == 0


def test_a_gateway_that_has_stopped_does_not_wait_for_its_threads() -> None:
    program = """
import asyncio, sys, time
from gateway import __main__ as gateway
async def serve(config):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
gateway.serve = serve
gateway.main(["--target", "127.0.0.1:9"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("module", ["gateway", "target_service"])
def test_what_is_still_starting_ends_at_a_signal(module: str, target_folder: str, tmp_path: Path) -> None:
    """As the first process of a container it would otherwise not hear it at all."""
    args = ["--target", "127.0.0.1:9"] if module == "gateway" else ["--model", target_folder]
    process = Process(module, [*args, "--port", "0"], stderr_path=tmp_path / "log", wait=False)
    status = Path(f"/proc/{process.pid}/status")
    caught = re.compile(r"SigCgt:\s*(\w+)")
    hangup = 1 << (signal.SIGHUP - 1)
    wait_until(lambda: int(caught.findall(status.read_text())[0], 16) & hangup, "it never cares for SIGHUP", 60)
    process.popen.send_signal(signal.SIGUSR1)  # which is ignored
    process.popen.send_signal(signal.SIGHUP)
    assert process.popen.wait(20) == 0, process.log()
    process.stop()


async def test_busy_time_and_the_longest_step_are_told(target_folder: str) -> None:
    with worker("target_service", target_folder) as process:
        async with ControlClient(process.address, "target") as client:
            before = await client.info()
            assert (before.busy_us, before.longest_step_us, before.num_steps) == (0, 0, 0)
            await client.opened(1, PROMPT)
            await client.ask(verify(1, len(PROMPT)))
            after = await client.info()
    assert 0 < after.longest_step_us <= after.busy_us
    assert not after.is_draining
