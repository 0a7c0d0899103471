"""Both workers as processes: health, reflection, answers during a forward, errors at start, ends."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Literal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from tests.service.conftest import worker
from tests.service.control_client import ControlClient, eventually, idle, new_ticket, verify
from tests.stack import Process
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

Kind = Literal["target", "draft"]
LONG_PROMPT = 2000


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Large enough that a forward over LONG_PROMPT tokens takes seconds on one core."""
    path = tmp_path_factory.mktemp("slow")
    return tiny_llama(path, hidden_size=384, num_layers=12, context=LONG_PROMPT + 64)


@pytest.fixture(scope="module", params=["target", "draft"])
def slow_worker(request: pytest.FixtureRequest, slow_folder: str) -> Iterator[tuple[Kind, Process]]:
    """Feeds a prompt in one forward."""
    with worker(f"{request.param}_service", slow_folder, "--max-prefill-tokens", str(LONG_PROMPT)) as process:
        yield request.param, process


async def test_every_handler_answers_while_a_forward_runs(slow_worker: tuple[Kind, Process]) -> None:
    kind, process = slow_worker
    prompt = [(7 * i) % 320 for i in range(LONG_PROMPT)]
    async with ControlClient(process.address, kind) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        await client.opened(1, prompt, target_address="127.0.0.1:9", k=1)
        started = time.monotonic()
        if kind == "draft":
            client.tell(dpb.Advance(slot=1, base_len=LONG_PROMPT, ticket=1))
            answer = asyncio.ensure_future(eventually(lambda info: info.num_steps >= 1, client))
        else:
            answer = client.start(verify(1, LONG_PROMPT))
        latencies: list[float] = []
        while not answer.done():
            asked = time.monotonic()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            await client.info()
            await client.stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=30)
            latencies.append(time.monotonic() - asked)
            await asyncio.sleep(0.01)
        took = time.monotonic() - started
        assert not isinstance(answer.result(), pb.WorkerError)
    assert took > 0.4, f"the forward took {took:.2f} s: too short to show anything"
    assert len(latencies) >= 10, f"{len(latencies)} answers in {took:.2f} s"
    assert sorted(latencies)[len(latencies) // 2] < took / 10


async def test_a_new_slot_and_a_close_pass_a_forward(slow_worker: tuple[Kind, Process]) -> None:
    """A client that leaves while its prompt is fed is forgotten as soon as that forward ends."""
    kind, process = slow_worker
    async with ControlClient(process.address, kind) as watcher:
        async with ControlClient(process.address, kind) as client:
            await client.opened(1, [5] * LONG_PROMPT, target_address="127.0.0.1:9", k=1)
            if kind == "draft":
                client.tell(dpb.Advance(slot=1, base_len=LONG_PROMPT, ticket=1))
            await eventually(lambda info: info.num_kv_blocks_in_use > 0, watcher)
        await eventually(idle, watcher, 60)


# end


@pytest.mark.parametrize(
    "kind, number",
    [
        ("target", signal.SIGTERM),
        ("draft", signal.SIGINT),
        pytest.param("target", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("draft", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
async def test_a_signal_ends_it_with_streams_open(kind: Kind, number: int, target_folder: str) -> None:
    with worker(f"{kind}_service", target_folder) as process:
        async with ControlClient(process.address, kind) as client:
            await client.opened(1, [5, 6, 7], k=3)
            if kind == "target":
                client.start(verify(1, 3, ticket=new_ticket()))
                await eventually(lambda info: info.num_leases == 1, client)
            deliver = client.stub.Deliver() if kind == "target" else None
            if deliver is not None:
                await deliver.write(tpb.DeliveryBatch())
            os.kill(process.pid, number)
            started = time.monotonic()
            assert await asyncio.to_thread(process.popen.wait, 20) == 0
            assert time.monotonic() - started < 10
            assert await client.stream.code() == grpc.StatusCode.UNAVAILABLE
            assert "stopping" in await client.stream.details()
            if deliver is not None:
                deliver.cancel()
