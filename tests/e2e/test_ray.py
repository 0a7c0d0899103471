"""The launcher with a real Ray: placement, restart under a stream, refusal, and what is left when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, TokenKind
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.e2e.process_tree import Command, Tree, tree
from tests.e2e.reference import assert_target_alone
from tests.e2e.relay import Relay
from tests.e2e.streams import PROMPT, Seen, greedy, plain, speculative
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Process

STUBS = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}
MAX_TOKENS = 1900
PAUSE_S = 0.02
"""Ray takes a few seconds; without it a fast machine's stream may be over by then."""


def settings(**parts: Any) -> str:
    system: dict[str, Any] = {"target": {"model": DEMO_TARGET}, "draft": {"model": DEMO_DRAFT}}
    for part, given in parts.items():
        system[part] = {**system.get(part, {}), **given}
    return json.dumps(system) + "\n"


@contextlib.contextmanager
def launched(line: str) -> Iterator[Command]:
    command = Command("-m", "deploy.launcher", "--config", "-", stdin=line)
    try:
        yield command
    finally:
        command.end()


def get_info(role: str, address: str) -> pb.WorkerInfo:
    with grpc.insecure_channel(address) as channel:
        return STUBS[role](channel).GetInfo(pb.GetInfoRequest(), timeout=10)


def wait_for_new_life(role: str, address: str, epoch: int, timeout_s: float) -> pb.WorkerInfo:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        with contextlib.suppress(grpc.RpcError):
            info = get_info(role, address)
            if info.epoch != epoch:
                return info
        time.sleep(0.2)
    raise AssertionError(f"no new {role} at {address} after {timeout_s} s")


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def pair(processes: Tree) -> Iterator[dict[str, Any]]:
    """The launcher's ready line."""
    with launched(settings()) as command:
        yield command.ready()


def test_workers_are_processes_of_their_own_on_disjoint_cores(pair: dict[str, Any]) -> None:
    target, draft = get_info("target", pair["target"]), get_info("draft", pair["draft"])
    assert {"target": target.pid, "draft": draft.pid} == pair["pids"]
    assert target.pid != draft.pid
    for info in (target, draft):
        assert set(info.cpu_cores) == os.sched_getaffinity(info.pid)
        assert info.visible_devices == ""
        assert info.HasField("visible_devices")
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(target.cpu_cores) & set(draft.cpu_cores)
        assert set(target.cpu_cores) | set(draft.cpu_cores) == os.sched_getaffinity(0)


def test_nothing_of_ray_listens_beyond_this_machine(pair: dict[str, Any], processes: Tree) -> None:
    """Our own Ray takes no token, so it must not be reachable."""
    addresses = listening_addresses(set(processes.now()))
    assert len(addresses) >= 4  # two workers, and Ray's own
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@contextlib.asynccontextmanager
async def paced_gateway(pair: dict[str, Any]) -> AsyncIterator[str]:
    """Address of a gateway whose messages take PAUSE_S to the target, so that a stream outlives Ray's restart."""
    async with Relay("target", pair["target"], hold=lambda item: PAUSE_S) as relay:
        workers = ["--target", relay.address, "--target-for-draft", pair["target"], "--draft", pair["draft"]]
        gateway = await asyncio.to_thread(Process, "gateway", [*workers, "--port", "0", "--grpc-port", "0"])
        try:
            yield str(gateway.ready["grpc"])
        finally:
            await asyncio.to_thread(gateway.stop)


@pytest.mark.timeout(240)
async def test_a_killed_draft_comes_back_at_its_address_and_drafts_resume_in_the_same_stream(
    pair: dict[str, Any],
) -> None:
    before, target = get_info("draft", pair["draft"]), get_info("target", pair["target"])
    seen = Seen()
    async with paced_gateway(pair) as address, AsyncClient(address) as client:
        async with greedy(client, MAX_TOKENS) as stream:
            await seen.read(stream, speculative(5))
            os.kill(before.pid, signal.SIGKILL)
            await seen.read(stream, plain(10))
            await seen.read(stream, speculative(10))
        after = await asyncio.to_thread(get_info, "draft", pair["draft"])
    assert seen.phases.endswith("sps"), seen.phases
    assert len(seen.ids) < MAX_TOKENS  # drafts came back before the end
    assert after.epoch != before.epoch
    assert after.pid != before.pid
    assert list(after.cpu_cores) == list(before.cpu_cores)
    assert after.visible_devices == ""
    assert get_info("target", pair["target"]).epoch == target.epoch
    assert all(token.kind is TokenKind.PLAIN for r in seen.rounds if not r.num_drafted for token in r.tokens)
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))


@pytest.fixture
def joining_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a driver reaches a Ray that has no token and listens on loopback alone."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@pytest.mark.usefixtures("joining_ours")
def test_a_second_system_is_refused_while_the_cores_are_taken(pair: dict[str, Any]) -> None:
    with launched(settings(ray={"address": pair["ray"]})) as command:
        assert command.wait() == 1
    assert "the workers cannot be placed" in command.err[-1]
    assert "has free [0 GPU, 0 CPU]" in command.err[-1]
    assert get_info("target", pair["target"]).pid == pair["pids"]["target"]


@pytest.mark.slow
@pytest.mark.usefixtures("joining_ours")
def test_two_systems_share_a_cluster_and_end_apart(processes: Tree) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two systems need a core each")

    def on_core(core: int, **ray: str) -> str:
        return settings(target={"cpu_cores": str(core)}, draft={"cpu_cores": str(core)}, ray=ray)

    with launched(on_core(cores[0])) as first:
        one = first.ready()
        with launched(on_core(cores[1], address=one["ray"])) as second:
            two = second.ready()
            assert len({*one["pids"].values(), *two["pids"].values()}) == 4
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert not set(two["pids"].values()) & set(processes.now())
        assert get_info("draft", one["draft"]).pid == one["pids"]["draft"]


def test_a_gpu_that_is_not_there_is_an_error_with_a_reason(processes: Tree) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU")
    started = time.monotonic()
    with launched(settings(target={"device": "cuda"})) as command:
        assert command.wait() == 1
    assert time.monotonic() - started < 45
    assert command.err[-1] == (
        "launcher: target.device is 'cuda' and Ray sees no GPU; say --target-device cpu, or join a cluster"
    )


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://head:10001", "head"])
def test_a_cluster_that_is_not_there_is_an_error_at_once(address: str) -> None:
    started = time.monotonic()
    with launched(settings(ray={"address": address})) as command:
        assert command.wait() == 1
    assert time.monotonic() - started < 30
    assert len(command.err) == 1
    assert address in command.err[0]


def test_a_model_that_is_not_there_is_an_error_with_a_reason(processes: Tree) -> None:
    with launched(settings(draft={"model": "/nowhere/draft"})) as command:
        assert command.wait() == 1
    assert command.err[-1].startswith("launcher: ")
    assert "/nowhere/draft" in command.err[-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "end of stdin"])
def test_it_leaves_no_process(how: str) -> None:
    with tree() as left, launched(settings()) as command:
        command.ready()
        assert left.pids_of("raylet")
        if how == "end of stdin":
            assert command.process.stdin is not None
            command.process.stdin.close()
        else:
            command.signal(signal.Signals[how])
        assert command.wait() == 0
        assert left.now() == {}


def listening_addresses(pids: set[int]) -> list[str]:
    """Local addresses, in the hexadecimal of /proc/net/tcp, that these processes listen on."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    return found
