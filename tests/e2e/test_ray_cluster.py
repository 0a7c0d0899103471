"""A cluster that is not ours: joined, waited for, left as it was even in a hurry, and taken over after a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.process_tree import Tree, tree
from tests.e2e.test_ray import launched, settings
from tests.e2e.test_up import http_of, up

ACTOR = "ray::WorkerActor"
STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(processes: Tree) -> Iterator[Any]:
    """Of one machine, started by somebody else: `ray start`, in effect."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("RAY_AUTH_MODE", "disabled")
        env.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from ray.cluster_utils import Cluster

        num_cpus = len(os.sched_getaffinity(0))
        head = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        made.shutdown()


def test_two_quick_ctrl_c_leave_no_actor_on_a_cluster_that_goes_on(cluster: Any, processes: Tree) -> None:
    before = set(processes.pids_of("raylet"))
    command = up("--port", "0", "--grpc-port", "0", "--ray-address", cluster.address)
    try:
        http_of(command)
        assert len(processes.pids_of(ACTOR)) == 2
        command.signal(signal.SIGINT)
        time.sleep(0.3)
        command.signal(signal.SIGINT)
        assert command.wait() == 0, command.log()
        give_up = time.monotonic() + 10
        while processes.pids_of(ACTOR) and time.monotonic() < give_up:
            time.sleep(0.1)
        assert processes.pids_of(ACTOR) == []
        assert set(processes.pids_of("raylet")) >= before
    finally:
        command.end()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_wait_for_machines_with_their_labels_and_the_next_launcher_takes_them_over(
    cluster: Any, processes: Tree
) -> None:
    """The next one of the same name, after this one was killed."""
    labels = {"outrider/role": "draft"}
    line = settings(draft={"labels": labels}, ray={"address": cluster.address, "name": "prod"})
    added: list[Any] = []
    try:
        with launched(line) as first:
            waiting = first.wait_for('"waiting"')
            assert "1 x draft: 0 GPU, 1 CPU with outrider/role=draft" in waiting
            added.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, labels=labels))
            before = {member["name"]: member["pid"] for member in first.ready()["members"]}
            first.signal(signal.SIGKILL)
            first.wait()
        with launched(line) as second:
            after = {member["name"]: member["pid"] for member in second.ready()["members"]}
            assert after == before  # no model was loaded again
            second.signal(signal.SIGKILL)
            second.wait()
        # Other settings: what does not fit them is ended, what does goes on.
        other = settings(draft={"labels": labels, "max_slots": 3}, ray={"address": cluster.address, "name": "prod"})
        with launched(other) as third:
            changed = {member["name"]: member["pid"] for member in third.ready()["members"]}
            assert changed["target-0"] == before["target-0"]
            assert changed["draft-0"] != before["draft-0"]
            third.signal(signal.SIGTERM)
            assert third.wait() == 0
        assert processes.pids_of(ACTOR) == []
    finally:
        for node in added:
            cluster.remove_node(node)


def test_without_a_name_workers_end_with_a_launcher_that_is_killed(cluster: Any, processes: Tree) -> None:
    with launched(settings(ray={"address": cluster.address})) as command:
        command.ready()
        assert len(processes.pids_of(ACTOR)) == 2
        command.signal(signal.SIGKILL)
        command.wait()
    give_up = time.monotonic() + 30
    while processes.pids_of(ACTOR):
        assert time.monotonic() < give_up
        time.sleep(0.1)
