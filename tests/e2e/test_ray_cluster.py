"""A cluster that is not ours: joined, waited for, left as it was even in a hurry, and taken over after a crash."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process_tree import Command, Tree, tree
from tests.e2e.registry_load import sizes
from tests.e2e.test_ray import launched, settings
from tests.e2e.test_up import complete, http_of, up
from tests.waiting import wait_until_none

ACTOR = "ray::WorkerActor"
STORE_BYTES = 80 << 20
HEAD_LABELS = {"outrider/node": "head"}


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
        head = {
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "labels": HEAD_LABELS,
        }
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        made.shutdown()


@pytest.mark.slow
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
        wait_until_none(lambda: processes.pids_of(ACTOR), 10)
        assert set(processes.pids_of("raylet")) >= before
    finally:
        command.end()


def pids(command: Command) -> dict[str, int]:
    """By member, once all serve."""
    return {member["name"]: member["pid"] for member in command.ready()["members"]}


def killed(command: Command) -> None:
    command.signal(signal.SIGKILL)
    command.wait()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_next_launcher_of_a_name_takes_over_what_it_would_start_itself(cluster: Any, processes: Tree) -> None:
    """The one before was killed each time."""
    ray = {"address": cluster.address, "name": "prod"}
    line = settings(draft={"labels": HEAD_LABELS}, ray=ray)
    with launched(line) as first:
        before = pids(first)
        killed(first)
    with launched(line) as second:
        assert pids(second) == before  # no model was loaded again
        killed(second)
    elsewhere = {name: f"in({value},other)" for name, value in HEAD_LABELS.items()}
    with launched(settings(draft={"labels": elsewhere}, ray=ray)) as third:
        changed = pids(third)
        assert changed["target-0"] == before["target-0"]
        assert changed["draft-0"] != before["draft-0"]
        third.signal(signal.SIGTERM)
        assert third.wait() == 0
    assert processes.pids_of(ACTOR) == []


@pytest.mark.slow
def test_without_a_name_workers_end_with_a_launcher_that_is_killed(cluster: Any, processes: Tree) -> None:
    with launched(settings(ray={"address": cluster.address})) as command:
        command.ready()
        assert len(processes.pids_of(ACTOR)) == 2
        command.signal(signal.SIGKILL)
        command.wait()
    wait_until_none(lambda: processes.pids_of(ACTOR))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_up_starts_a_killed_launcher_again_and_gateways_serve_on(cluster: Any, processes: Tree, tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text(json.dumps({"ray": {"address": cluster.address, "name": "kept"}}))
    command = up("--port", "0", "--grpc-port", "0", "--config", str(file))
    try:
        url = http_of(command)
        (registry,) = re.findall(r"registry  (\S+)", command.wait_for("registry  "))
        workers = set(processes.pids_of(ACTOR))
        os.kill(processes.pids_of("deploy.launcher")[0], signal.SIGKILL)
        command.wait_for("launcher was ended by signal 9; it is started again")
        text = complete(url)["choices"]
        command.wait_for("launcher:  WARNING it serves again")
        assert set(processes.pids_of(ACTOR)) == workers
        assert sizes(registry, "target").num_serving == 1  # where gateways look for it
        assert complete(url)["choices"] == text
        command.signal(signal.SIGINT)
        assert command.wait() == 0, command.log()
        assert processes.pids_of(ACTOR) == []
    finally:
        command.end()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_wait_for_a_machine_with_their_labels(cluster: Any, processes: Tree) -> None:
    """Last of these: for a while the head takes a machine for alive that has gone.

    Without labels the target could take the only room that the draft may have.
    """
    there = {"outrider/node": "added"}
    line = settings(
        target={"labels": HEAD_LABELS}, draft={"labels": there, "num_cpus": 1}, ray={"address": cluster.address}
    )
    with launched(line) as command:
        assert "1 x draft: 0 GPU, 1 CPU with outrider/node=added" in command.wait_for('"waiting"')
        added = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, labels=there)
        try:
            assert set(pids(command)) == {"target-0", "draft-0"}
            command.signal(signal.SIGTERM)
            assert command.wait() == 0
        finally:
            cluster.remove_node(added, allow_graceful=False)
    assert processes.pids_of(ACTOR) == []
