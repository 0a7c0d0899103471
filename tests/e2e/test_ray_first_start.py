"""A start with a real Ray in which a worker's process ends before it has loaded, as one that the kernel kills does."""

import contextlib
import json
import os
import signal
import time

import pytest

from tests.e2e.process_tree import Command, tree
from tests.stack import DEMO_TARGET

SYSTEM = {"targets": {"chat": {"model": DEMO_TARGET}}, "gateways": 0}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_once", [False, True])
def test_a_process_that_ends_while_it_loads_is_started_again_but_not_for_ever(is_once: bool) -> None:
    with tree() as processes:
        command = Command("-m", "deploy.launcher", "--config", "-", stdin=json.dumps(SYSTEM) + "\n")
        try:
            killed: set[int] = set()
            give_up = time.monotonic() + 200
            while command.process.poll() is None and not (is_once and killed):
                assert time.monotonic() < give_up, command.log()
                for pid in set(processes.pids_of("WorkerActor")) - killed:
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            if is_once:
                command.ready()
                return
            assert command.wait() == 1
            assert len(killed) >= 3
            assert any("the process of target-chat-0 ended 3 times while it started" in line for line in command.err)
        finally:
            command.end()
