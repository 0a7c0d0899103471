"""A container that is about to end: its workers drain first, and only then Ray's node ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy import actors, node_drain
from deploy.actors import ActorSpec, StartedActor, WorkerActor
from deploy.node_drain import drain_workers, listen
from deploy.placement import Placement

STAY = """
import sys
from pathlib import Path
from deploy.docker.stay import stay
sys.exit(stay({pid}, {program!r}, Path({at!r})))
"""
RAYLET = [sys.executable, "-c", "import time; time.sleep(60)"]


@dataclass
class PlayedHandle:
    """A worker whose one slot is open until `free`."""

    free: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    limits: list[float] = field(default_factory=list)

    def drain(self, timeout_s: float) -> None:
        self.limits.append(timeout_s)
        self.asked.set()
        assert self.free.wait(timeout_s)

    def wait_failed(self) -> None:
        return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(RAYLET) as process:
        yield process
        process.kill()


def staying(ray: subprocess.Popen[bytes], folder: Path, program: str = "raylet") -> subprocess.Popen[bytes]:
    """Run it as in a node's container, with a program of Ray's that is played; it waits for signals already."""
    process = subprocess.Popen([sys.executable, "-c", STAY.format(pid=ray.pid, program=program, at=str(folder))])
    caught = 1 << (signal.SIGTERM - 1)
    give_up = time.monotonic() + 20
    while not int(_status(process.pid)["SigCgt"], 16) & caught:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return process


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_node_that_is_told_to_end_waits_for_its_worker(raylet: subprocess.Popen[bytes], folder: Path) -> None:
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


def test_a_head_that_is_told_to_end_does_not_wait_for_a_gcs_server_that_hangs(folder: Path) -> None:
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hangs]) as gcs_server:
        process = staying(gcs_server, folder, "gcs_server")
        process.terminate()
        assert gcs_server.wait(10) == -signal.SIGKILL
        assert process.wait(10) == 0


def test_who_is_gone_or_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_drain, "_HELLO_S", 0.2)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as hung:
        gone.bind(str(folder / "1.sock"))
        hung.bind(str(folder / "2.sock"))
        hung.listen()
        began_s = time.monotonic()
        assert drain_workers(folder) == 0
    assert 0.2 <= time.monotonic() - began_s < 2


def test_a_rays_worker_drains_when_its_node_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as its settings say, and only where a folder is named: elsewhere `ray stop` is not ours to hear."""
    worker = PlayedHandle()
    worker.free.set()
    monkeypatch.setattr(actors, "_node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actors, "_start", lambda config, ranks_folder: worker)
    monkeypatch.setattr(actors, "_facts", lambda handle, node: StartedActor("127.0.0.1:1", os.getpid(), 1, None, node))
    settings: dict[str, Any] = {"model": "m", "drain_timeout_s": 7.0}
    spec = ActorSpec("draft-0", "draft", "draft", settings, Placement("cpu", 0.0, 1.0, None, None))
    monkeypatch.delenv(node_drain.FOLDER, raising=False)
    WorkerActor(spec)
    assert not folder.exists()
    monkeypatch.setenv(node_drain.FOLDER, str(folder))
    WorkerActor(spec)
    assert drain_workers(folder) == 1
    assert worker.limits == [7.0]
