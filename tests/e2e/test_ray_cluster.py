"""A cluster that is not ours: joined, left as it was even in a hurry, and refused when it has several machines."""

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


def test_a_cluster_of_two_machines_is_refused_by_number(cluster: Any) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    try:
        with launched(settings(ray={"address": cluster.address})) as command:
            assert command.wait() == 1
        assert "the cluster has 2 machines" in command.err[-1]
        assert "start the workers by hand" in command.err[-1]
    finally:
        cluster.remove_node(second)
