"""Workers of a node that is about to end drain first."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import actors, node_drain
from deploy.actors import ActorSpec, StartedActor, WorkerActor
from deploy.node_drain import drain_workers
from deploy.placement import Placement
from tests.unit.deploy.draining import PlayedHandle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node"


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
