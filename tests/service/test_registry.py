"""The launcher's registry over real gRPC, what the launcher sees of workers, and cores taken by processes."""

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import Gauge

from deploy.actors import lock_cores
from deploy.registry import Registry
from deploy.sightings import Sighting, WorkerCalls
from gateway.workers.membership import Membership
from gateway.workers.registry_client import RegistryClient
from outrider.v1 import common_pb2, draft_pb2_grpc, registry_pb2, registry_pb2_grpc
from outrider.wire.errors import InvalidRequest
from outrider.wire.peer_text import MAX_INFO_BYTES
from outrider.wire.protocol import PROTOCOL
from outrider.wire.transport.serving import ServerThread
from outrider.wire.transport.tls import CertificateFolder
from tests.forked import REPO
from tests.waiting import wait_until

pb = registry_pb2


class Scaled:
    """Plays the launcher: one pool that reaches what is wanted at the second question."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.size = pb.PoolSize(pool="small", role=pb.ROLE_DRAFT, num_desired=1, num_serving=1)

    def __call__(self, pool: str, count: int | None) -> concurrent.futures.Future[pb.ScaleReply]:
        self.calls.append((pool, count))
        done: concurrent.futures.Future[pb.ScaleReply] = concurrent.futures.Future()
        if pool not in ("", "small"):
            done.set_exception(InvalidRequest(f"there is no pool {pool!r}"))
            return done
        if count is not None:
            self.size = pb.PoolSize(pool="small", role=pb.ROLE_DRAFT, num_desired=count, num_serving=1, num_starting=1)
        elif self.size.num_starting:
            self.size = pb.PoolSize(pool="small", role=pb.ROLE_DRAFT, num_desired=2, num_serving=2)
        done.set_result(pb.ScaleReply(pools=[self.size]))
        return done


@pytest.fixture
def scaled() -> Scaled:
    return Scaled()


@pytest.fixture
def registry(scaled: Scaled) -> Iterator[Registry]:
    made = Registry(scaled)
    made.start("127.0.0.1:0", None)
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def joined(address: str, gateway: str = "g") -> AsyncIterator[tuple[Any, Callable[..., Any]]]:
    """(the stream of memberships, a function that sends a report)."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Join()

        async def report(**load: int) -> None:
            loads = [pb.PoolLoad(pool="chat", **load)]
            await call.write(pb.GatewayReport(gateway=gateway, pools=loads, protocol=PROTOCOL))

        yield call, report
        call.cancel()


def membership(version: int, *members: str) -> pb.WorkerList:
    return pb.WorkerList(epoch=5, version=version, workers=[pb.Worker(name=name) for name in members])


async def test_who_joins_hears_the_present_membership_and_every_later_one(registry: Registry) -> None:
    registry.send_membership(membership(1, "a"))
    async with joined(registry.address) as (first, _), joined(registry.address) as (second, _):
        for call in (first, second):
            assert [one.name for one in (await call.read()).workers] == ["a"]
        registry.send_membership(membership(2, "a", "b"))
        for call in (first, second):
            assert [one.name for one in (await call.read()).workers] == ["a", "b"]


async def test_a_gateway_waits_on_while_the_workers_of_its_launcher_load(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher has no membership until then; a gateway that ended would be started anew later and later."""
    heard: list[Membership] = []
    connected = Gauge("connected", "", registry=None)
    client = RegistryClient(registry.address, None, pb.GatewayReport, heard.append, connected)
    try:
        waiting = asyncio.create_task(client.wait_first(0.05))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        assert f"no workers from the registry at {registry.address} within 0.05 s" in caplog.text
        message = membership(1)
        message.pools.add(name="chat", role=pb.ROLE_TARGET)
        registry.send_membership(message)
        await asyncio.wait_for(waiting, 10)
        assert [pool.name for pool in heard[0].pools] == ["chat"]
    finally:
        await client.close()


async def test_a_slow_reader_misses_versions_but_never_the_last(registry: Registry) -> None:
    async with joined(registry.address) as (call, _):
        for version in range(1, 200):
            registry.send_membership(membership(version, f"worker-{version}"))
        last = 0
        while last < 199:
            found = await asyncio.wait_for(call.read(), 5)
            assert found.version > last
            last = found.version


async def test_reports_are_those_of_gateways_that_are_there(registry: Registry) -> None:
    async with joined(registry.address, "one") as (_, report), joined(registry.address, "two") as (_, other):
        await report(num_queued=3)
        await report(num_queued=4)
        await other(num_queued=5)

        def found() -> dict[str, int]:
            return {one.gateway: one.pools[0].num_queued for one in registry.reports()}

        await asyncio.to_thread(wait_until, lambda: found().get("one") != 3 and len(found()) == 2, "the last reports")
        assert found() == {"one": 4, "two": 5}
    await asyncio.to_thread(wait_until, lambda: registry.reports() == [], "no report")


async def test_a_report_that_is_no_message_ends_that_stream_alone(registry: Registry) -> None:
    registry.send_membership(membership(1, "a"))
    async with grpc.aio.insecure_channel(registry.address) as channel, joined(registry.address) as (good, _):
        assert (await good.read()).version == 1
        call: Any = channel.stream_stream("/outrider.v1.RegistryService/Join")()  # type: ignore[call-arg]
        await call.write(b"\xff\xff\xff")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        registry.send_membership(membership(2, "a"))
        assert (await good.read()).version == 2


async def test_gateways_are_told_when_the_launcher_stops() -> None:
    registry = Registry(Scaled())
    registry.start("127.0.0.1:0", None)
    registry.send_membership(membership(1, "a"))
    async with joined(registry.address) as (call, _):
        assert (await call.read()).version == 1
        await asyncio.to_thread(registry.stop)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class PlayedDraft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.num_refusals = 0
        """How many times it is to answer with another refusal each, before it says what it is."""
        self.num_cores = 0

    async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        if self.hangs.is_set():
            await asyncio.sleep(5)
        if self.num_refusals:
            self.num_refusals -= 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"refusal {self.num_refusals}")
        return common_pb2.WorkerInfo(epoch=3, num_slots_in_use=2, cpu_cores=range(self.num_cores))


@contextlib.contextmanager
def played_draft(certificates: CertificateFolder | None = None) -> Iterator[tuple[PlayedDraft, ServerThread]]:
    server, draft = ServerThread(), PlayedDraft()

    def add(grpc_server: Any) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, grpc_server)
        return ["outrider.v1.DraftService"]

    server.start(add, "127.0.0.1", 0, 1 << 20, certificates)
    try:
        yield draft, server
    finally:
        draft.hangs.clear()
        server.stop(0.1)


def test_what_a_worker_says_of_itself_is_bounded_in_the_launcher_and_its_log(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deploy.sightings.PERIOD_S", 0.0)
    monkeypatch.setattr("outrider.wire.peer_text.MAX_REASONS", 2)
    calls, seen = WorkerCalls(registry.loop, None), list[Sighting]()
    with played_draft() as (draft, server):
        draft.num_refusals, draft.num_cores = 3, MAX_INFO_BYTES
        calls.watch("draft-0", "draft", server.address)
        wait_until(lambda: bool(seen.extend(calls.read_sightings()) or len(seen) > 3), "all refusals")
        calls.forget("draft-0")
    assert all(one.info is None for one in seen)
    assert "the draft describes itself in" in str(seen[3].refusal)
    assert caplog.text.count("refuses GetInfo") == 2


def test_a_worker_is_seen_to_answer_to_hang_and_to_be_gone(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.sightings.PERIOD_S", 0.05)
    monkeypatch.setattr("deploy.sightings.TIMEOUT_S", 0.3)
    calls = WorkerCalls(registry.loop, None)

    def next_that(holds: Callable[[Sighting], bool]) -> Sighting:
        found: list[Sighting] = []
        wait_until(lambda: bool(found.extend(one for one in calls.read_sightings() if holds(one)) or found), "a sight")
        return found[0]

    with played_draft() as (draft, server):
        calls.watch("draft-0", "draft", server.address)
        seen = next_that(lambda one: one.info is not None)
        assert (seen.member, seen.address) == ("draft-0", server.address)
        assert seen.info is not None and (seen.info.epoch, seen.info.num_slots_in_use) == (3, 2)
        draft.hangs.set()
        assert next_that(lambda one: one.info is None).is_silent
        draft.hangs.clear()
        next_that(lambda one: one.info is not None)
    assert not next_that(lambda one: one.info is None and not one.is_silent).is_silent
    calls.forget("draft-0")
    time.sleep(0.5)
    calls.read_sightings()
    time.sleep(0.3)
    assert calls.read_sightings() == []


HOLD = """
import sys
from pathlib import Path
from deploy.actors import lock_cores
print(*sorted(lock_cores(int(sys.argv[1]), Path(sys.argv[2]), frozenset(range(4)))), flush=True)
sys.stdin.read()
"""


def test_workers_take_the_least_occupied_cores(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:

        def holder(count: int) -> tuple[subprocess.Popen[str], list[int]]:
            line = [sys.executable, "-c", HOLD, str(count), str(tmp_path)]
            process = subprocess.Popen(line, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ending.enter_context(process)  # leaving it closes its stdin, at which it ends
            assert process.stdout is not None
            return process, [int(core) for core in process.stdout.readline().split()]

        first, of_first = holder(2)
        assert of_first == [0, 1]
        assert holder(1)[1] == [2]
        first.kill()  # a lock goes with its process, however that ended
        first.wait()
        assert sorted(lock_cores(2, tmp_path, frozenset(range(4)))) == [0, 1]
        assert sorted(lock_cores(3, tmp_path, frozenset(range(4)))) == [0, 1, 3]  # 3 was free, the others are shared
        assert lock_cores(9, tmp_path, frozenset(range(4))) == frozenset(range(4))
