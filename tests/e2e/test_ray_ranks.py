"""A split target under Ray: its ranks are actors, and when one is lost all come back together."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.placement import ClusterNode, place
from outrider.wire.settings.system import SystemConfig
from tests.e2e.process_tree import Tree, tree
from tests.e2e.test_ray import get_info, launched, settings, wait_for_new_life
from tests.waiting import wait_until

TARGET, DRAFT = {"tensor_parallel": 2, "device": "cpu"}, {"device": "cpu"}
"""Each test is told where the target is; with a port of its own it comes back there."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def split(processes: Tree) -> Iterator[dict[str, Any]]:
    """Where the target is, and its launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with launched(settings(target={**TARGET, "port": port}, draft=DRAFT)) as command:
        (target,) = [member for member in command.ready()["members"] if member["role"] == "target"]
        assert target["address"] == f"127.0.0.1:{port}"
        yield {"target": target["address"], "launcher": command}


def other_rank_pids(processes: Tree) -> list[int]:
    """Ray names a process after its actor's class."""
    found = []
    for pid in processes.now():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [pid] if b"RankActor" in file.read() else []
        except OSError:  # ended meanwhile
            continue
    return found


def test_ranks_are_actors_on_as_many_cores_as_were_planned(split: dict[str, Any], processes: Tree) -> None:
    info = get_info("target", split["target"])
    assert info.tensor_parallel == 2
    (other_rank,) = other_rank_pids(processes)
    assert other_rank != info.pid
    cores = frozenset(os.sched_getaffinity(0))
    planned = place(
        SystemConfig.read(json.loads(settings(target=TARGET, draft=DRAFT))), [ClusterNode(len(cores), 0)], cores
    )
    assert (planned["target"].num_ranks, planned["target"].num_cores) == (2, len(info.cpu_cores))
    assert len(os.sched_getaffinity(other_rank)) == len(info.cpu_cores)


@pytest.mark.parametrize("victim", ["other rank", "target"])
def test_a_lost_rank_brings_all_back(split: dict[str, Any], processes: Tree, victim: str) -> None:
    before, (other_rank,) = get_info("target", split["target"]), other_rank_pids(processes)
    os.kill(other_rank if victim == "other rank" else before.pid, signal.SIGKILL)
    after = wait_for_new_life("target", split["target"], before.epoch, timeout_s=150)
    assert after.pid != before.pid and after.tensor_parallel == 2
    wait_until(lambda: len(other_rank_pids(processes)) == 1, "one other rank")
    assert other_rank_pids(processes) != [other_rank]


def test_a_target_whose_port_is_taken_comes_back_with_its_other_rank(split: dict[str, Any], processes: Tree) -> None:
    """It finds its port taken before it meets the other rank, which waits for its next life."""
    before = get_info("target", split["target"])
    host, port = split["target"].split(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: bound(taken, host, int(port)), f"port {port} is not free")
        assert f":{port}" in split["launcher"].wait_for("target-0 does not start again: ")
    after = wait_for_new_life("target", split["target"], before.epoch, timeout_s=150)
    assert after.tensor_parallel == 2
    wait_until(lambda: len(other_rank_pids(processes)) == 1, "one other rank")


def bound(server: socket.socket, host: str, port: int) -> bool:
    try:
        server.bind((host, port))
    except OSError:  # its last owner has not ended yet
        return False
    server.listen()
    return True
