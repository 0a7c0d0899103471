"""A split target under Ray: its ranks are actors, and when one is lost all come back together."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.placement import Node, place
from outrider.cli.system import SystemConfig
from tests.e2e.process_tree import Tree, tree
from tests.e2e.test_ray import get_info, launched, settings, wait_for_new_life
from tests.e2e.test_tensor_parallel import wait_until

TARGET, DRAFT = {"tensor_parallel": 2, "device": "cpu"}, {"device": "cpu"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def split(processes: Tree) -> Iterator[dict[str, Any]]:
    """The launcher's ready line."""
    with launched(settings(target=TARGET, draft=DRAFT)) as command:
        yield command.ready()


def follower_pids(processes: Tree) -> list[int]:
    """Ray names a process after its actor's class."""
    found = []
    for pid in processes.now():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [pid] if b"FollowerActor" in file.read() else []
        except OSError:  # ended meanwhile
            continue
    return found


def test_ranks_are_actors_on_the_cores_that_were_planned(split: dict[str, Any], processes: Tree) -> None:
    info = get_info("target", split["target"])
    assert info.tensor_parallel == 2
    (follower,) = follower_pids(processes)
    assert follower != info.pid
    cores = frozenset(os.sched_getaffinity(0))
    planned = place(SystemConfig.read(json.loads(settings(target=TARGET, draft=DRAFT))), [Node(len(cores), 0)], cores)
    assert planned["target"].cpu_cores == set(info.cpu_cores)
    assert planned["target-rank-1"].cpu_cores == os.sched_getaffinity(follower)


@pytest.mark.parametrize("victim", ["follower", "target"])
def test_a_lost_rank_brings_all_back(split: dict[str, Any], processes: Tree, victim: str) -> None:
    before, (follower,) = get_info("target", split["target"]), follower_pids(processes)
    os.kill(follower if victim == "follower" else before.pid, signal.SIGKILL)
    after = wait_for_new_life("target", split["target"], before.epoch, timeout_s=150)
    assert after.pid != before.pid and after.tensor_parallel == 2
    wait_until(lambda: len(follower_pids(processes)) == 1, "one follower")
    assert follower_pids(processes) != [follower]


def test_a_target_that_cannot_listen_at_first_comes_back_with_its_follower(
    split: dict[str, Any], processes: Tree
) -> None:
    """It loads, finds its port taken and ends; the follower, told so in good order, must not stay behind."""
    before, seen = get_info("target", split["target"]), follower_pids(processes)
    host, port = split["target"].split(":")

    def another_follower() -> bool:
        found = follower_pids(processes)
        return len(found) == 1 and found[0] not in seen

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: bound(taken, host, int(port)), f"port {port} is not free")
        for _ in range(2):  # the target's end, and its refused start
            wait_until(another_follower, "another follower", timeout_s=90)
            seen += follower_pids(processes)
    after = wait_for_new_life("target", split["target"], before.epoch, timeout_s=150)
    assert after.tensor_parallel == 2


def bound(server: socket.socket, host: str, port: int) -> bool:
    try:
        server.bind((host, port))
    except OSError:  # its last owner has not ended yet
        return False
    server.listen()
    return True
