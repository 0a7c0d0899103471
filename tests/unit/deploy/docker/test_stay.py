"""A node's container that is told to end: its workers drain, and only then Ray's node ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.node_drain import listen
from tests.unit.deploy.draining import PlayedHandle
from tests.waiting import wait_until

STAY = """
import sys
from pathlib import Path
from deploy.docker.stay import stay
sys.exit(stay({pid}, {program!r}, Path({at!r})))
"""
RAYLET = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(RAYLET) as process:
        yield process
        process.kill()


def staying(ray: subprocess.Popen[bytes], folder: Path, program: str = "raylet") -> subprocess.Popen[bytes]:
    """Run it as in a node's container, with a program of Ray's that is played; it waits for signals already."""
    process = subprocess.Popen([sys.executable, "-c", STAY.format(pid=ray.pid, program=program, at=str(folder))])
    caught = 1 << (signal.SIGTERM - 1)
    wait_until(lambda: int(_status(process.pid)["SigCgt"], 16) & caught, "it does not wait for SIGTERM")
    return process


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_node_that_receives_sigterm_waits_for_its_worker(raylet: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "node"
    worker = PlayedHandle()
    listen(folder, lambda: worker.drain(30), 30)
    process = staying(raylet, folder)
    process.terminate()
    assert worker.asked.wait(10)
    time.sleep(0.2)
    assert raylet.poll() is None, "an answer still runs"
    worker.free.set()
    assert raylet.wait(10) == -signal.SIGTERM
    assert process.wait(10) == 0


def test_a_head_that_receives_sigterm_does_not_wait_for_a_gcs_server_that_hangs(tmp_path: Path) -> None:
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hangs]) as gcs_server:
        process = staying(gcs_server, tmp_path / "node", "gcs_server")
        process.terminate()
        assert gcs_server.wait(10) == -signal.SIGKILL
        assert process.wait(10) == 0
