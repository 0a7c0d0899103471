"""A split target under Ray: its ranks are actors, and when one is lost all come back together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.process_tree import Tree, tree
from tests.e2e.test_ray import get_info, launched, settings, wait_for_new_life
from tests.e2e.test_tensor_parallel import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def split(processes: Tree) -> Iterator[dict[str, Any]]:
    """The launcher's ready line."""
    with launched(settings(target={"tensor_parallel": 2})) as command:
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


def test_ranks_are_actors_on_cores_of_their_own(split: dict[str, Any], processes: Tree) -> None:
    info = get_info("target", split["target"])
    assert info.tensor_parallel == 2
    (follower,) = follower_pids(processes)
    assert follower != info.pid
    if len(os.sched_getaffinity(0)) > 3:
        assert not os.sched_getaffinity(follower) & set(info.cpu_cores)


@pytest.mark.parametrize("victim", ["follower", "target"])
def test_a_lost_rank_brings_all_back(split: dict[str, Any], processes: Tree, victim: str) -> None:
    before, (follower,) = get_info("target", split["target"]), follower_pids(processes)
    os.kill(follower if victim == "follower" else before.pid, signal.SIGKILL)
    after = wait_for_new_life("target", split["target"], before.epoch, timeout_s=150)
    assert after.pid != before.pid and after.tensor_parallel == 2
    wait_until(lambda: len(follower_pids(processes)) == 1, "one follower")
    assert follower_pids(processes) != [follower]
