"""The launcher with a real Ray: restarts under load, refusal, and what is left when it ends."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.e2e.process_tree import Command, Tree, tree
from tests.e2e.registry_load import members, sizes, under_load, until_serving
from tests.stack import DEMO_DRAFT, DEMO_TARGET, KV_CACHE_TOKENS

STUBS: dict[str, Any] = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}
SHARE = 0.4
"""CPUs of each worker, so that Ray places all of them on two."""
SMALL = {"num_cpus": SHARE, "kv_cache_tokens": int(KV_CACHE_TOKENS), "metrics_port": 0}
POOLS = {
    "targets": {"chat": {"model": DEMO_TARGET, "count": 2, "batch_invariant": True, "model_name": "demo", **SMALL}},
    "drafts": {"small": {"model": DEMO_DRAFT, "count": 1, "serves": ["chat"], **SMALL}},
}


def settings(**parts: Any) -> str:
    system: dict[str, Any] = {"target": {"model": DEMO_TARGET}, "draft": {"model": DEMO_DRAFT}}
    for part, given in parts.items():
        system[part] = {**system.get(part, {}), **given}
    return json.dumps(system) + "\n"


@contextlib.contextmanager
def launched(line: str) -> Iterator[Command]:
    command = Command("-m", "tests.e2e.quick_launcher", "--config", "-", stdin=line)
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


async def until_elsewhere(registry: str, name: str, before: str) -> str:
    """Return where gateways are told that the member is now, which is not where it was before."""
    async with asyncio.timeout(120):
        while True:
            address: str = {member.name: member.address for member in await members(registry)}[name]
            if address not in ("", before):
                return address
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def system(processes: Tree) -> Iterator[dict[str, Any]]:
    """The launcher's ready line: two targets and a draft; and the folder of its Ray."""
    with launched(json.dumps(POOLS) + "\n") as command:
        ready = command.ready()
        events = [json.loads(line) for line in command.out if '"folder"' in line]
        yield {**ready, "folder": next(event["folder"] for event in events)}


RAYS_METHODS = {
    "NodeInfoGcsService/GetAllNodeInfo": 1,
    "NodeManagerService/GetSystemConfig": 1,
    "ObjectManagerService/Pull": 1,
    "CoreWorkerService/PushTask": 4,
}
"""With how many processes serve each: GCS, raylet, and the three workers with their launcher."""


def answer(port: int, method: str, token: str | None = None) -> grpc.StatusCode:
    """To an empty message."""
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10, metadata=metadata)  # type: ignore[call-arg]
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def token_of(system: dict[str, Any], processes: Tree) -> str:
    """Of its Ray, from where its own user alone may read it."""
    (pid,) = processes.pids_of(f"gcs_server --log_dir={system['folder']}")
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.partition("=")[::2] for variable in variables)["RAY_AUTH_TOKEN"]


@pytest.fixture
def reaching_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a driver reaches a Ray that listens on loopback alone."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def of_role(system: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [member for member in system["members"] if member["role"] == role]


def test_workers_are_processes_of_their_own_that_share_the_cores_evenly(system: dict[str, Any]) -> None:
    names = ["target-chat-0", "target-chat-1", "draft-small-0"]
    assert [member["name"] for member in system["members"]] == names
    infos = [get_info(member["role"], member["address"]) for member in system["members"]]
    assert [info.pid for info in infos] == [member["pid"] for member in system["members"]]
    assert len({info.pid for info in infos}) == 3
    for info in infos:
        assert set(info.cpu_cores) == os.sched_getaffinity(info.pid)
        assert len(info.cpu_cores) == 1
        assert info.HasField("visible_devices")
        assert info.visible_devices == ""
    used = [core for info in infos for core in info.cpu_cores]
    assert len(set(used)) == min(3, len(os.sched_getaffinity(0)))


def test_nothing_of_ray_listens_beyond_this_machine(system: dict[str, Any], processes: Tree) -> None:
    addresses = [address for address, _ in listening(set(processes.now()))]
    assert len(addresses) >= 8  # three workers with their metrics, the registry, and Ray's own
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_who_has_not_the_token_of_our_own_ray_is_refused(system: dict[str, Any], processes: Tree) -> None:
    """At every port, also those where code to run would be handed in, another process of the same user."""
    ports = {port for _, port in listening(set(processes.now()))}
    for method, num_servers in RAYS_METHODS.items():
        answers = Counter(answer(port, method) for port in ports)
        assert (answers[grpc.StatusCode.UNAUTHENTICATED], answers[grpc.StatusCode.OK]) == (num_servers, 0), method
    port, method = int(system["ray"].rpartition(":")[2]), next(iter(RAYS_METHODS))
    assert answer(port, method, "wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert answer(port, method, token_of(system, processes)) is grpc.StatusCode.OK


def test_the_token_of_our_own_ray_is_in_no_command_line_and_no_file(system: dict[str, Any], processes: Tree) -> None:
    token = token_of(system, processes)
    assert len(token) == 64
    assert [line for line in processes.now().values() if token in line] == []
    files = [path for path in Path(system["folder"]).rglob("*") if path.is_file()]
    assert any(path.name == "gcs_server.out" for path in files)
    assert [path for path in files if token.encode() in path.read_bytes()] == []
    assert stat.S_IMODE(os.stat(system["folder"]).st_mode) == 0o700  # Ray opens its own folders to everybody


@pytest.mark.timeout(600)
async def test_a_killed_draft_and_a_killed_target_come_back_elsewhere_and_gateways_follow(
    system: dict[str, Any],
) -> None:
    registry = system["registry"]
    before = {member.name: member.address for member in await members(registry)}
    killed = [(role, next(name for name in before if name.startswith(role))) for role in ("draft", "target")]
    async with under_load(registry) as load:
        infos = [await asyncio.to_thread(get_info, role, before[name]) for role, name in killed]
        for info in infos:
            os.kill(info.pid, signal.SIGKILL)
        for (role, name), info in zip(killed, infos, strict=True):
            address = await until_elsewhere(registry, name, before[name])
            await until_serving(registry, *(("small", 1) if role == "draft" else ("chat", 2)))
            after = await asyncio.to_thread(get_info, role, address)
            assert after.pid != info.pid
            assert after.epoch != info.epoch
            assert after.visible_devices == ""
    load.assert_whole()


@pytest.mark.usefixtures("reaching_ours")
def test_a_second_system_is_refused_while_the_cores_are_taken(
    system: dict[str, Any], processes: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token_of(system, processes))
    with launched(settings(ray={"address": system["ray"]})) as command:
        assert command.wait() == 1
    assert "the workers cannot be placed" in command.err[-1]
    assert "has free [0 GPU, " in command.err[-1]
    waiting = [line for line in command.out if '"waiting"' in line]
    assert len(waiting) == 1  # for a machine that may be about to join
    assert sizes(system["registry"], "chat").num_serving == 2


@pytest.mark.slow
@pytest.mark.usefixtures("reaching_ours")
def test_two_systems_share_a_cluster_and_end_apart(processes: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token that the operator exported for both."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-both")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two systems need a core each")

    def on_core(core: int, **ray: str) -> str:
        return settings(target={"cpu_cores": str(core)}, draft={"cpu_cores": str(core)}, ray=ray)

    with launched(on_core(cores[0])) as first:
        one = first.ready()
        with launched(on_core(cores[1], address=one["ray"])) as second:
            two = second.ready()
            pids = [{member["pid"] for member in each["members"]} for each in (one, two)]
            assert len(pids[0] | pids[1]) == 4
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert not pids[1] & set(processes.now())
        (draft,) = of_role(one, "draft")
        assert get_info("draft", draft["address"]).pid == draft["pid"]


@pytest.mark.slow
def test_the_end_of_its_stdin_ends_it_and_leaves_no_process() -> None:
    """As signals do: test_up.py."""
    with tree() as left, launched(settings()) as command:
        command.ready()
        assert left.pids_of("raylet")
        assert command.process.stdin is not None
        command.process.stdin.close()
        assert command.wait() == 0
        assert left.now() == {}


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """(address in the hexadecimal of /proc/net/tcp, port) that these processes listen on."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found: list[tuple[str, int]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
        found += [(address, int(port, 16)) for address, port in places]
    return found
