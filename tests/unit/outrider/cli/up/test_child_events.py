"""A command's child that reports: a signal to the command stops it with its grace, and a second one without."""

import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from outrider.cli.up.child_events import run_module
from outrider.wire.processes.processes import Event

_SAVES_WHEN_STOPPED = """
import json, os, pathlib, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
task = json.loads(sys.stdin.readline())
print(json.dumps({"event": "begun", "pid": os.getpid()}), flush=True)
while not stopped:
    time.sleep(0.01)
time.sleep(task["takes_s"])
pathlib.Path(task["saves"]).touch()
"""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "saves_when_stopped.py").write_text(_SAVES_WHEN_STOPPED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "saved"


def begin(saved: Path, takes_s: float) -> tuple[Generator[Event, None, None], int]:
    events = run_module("saves_when_stopped", {"saves": str(saved), "takes_s": takes_s}, "work", grace_s=60.0)
    return events, next(events)["pid"]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_the_child_save(number: signal.Signals, saved: Path) -> None:
    inherited = signal.signal(number, signal.default_int_handler)  # under nohup one of them is ignored, and stays so
    events, pid = begin(saved, takes_s=0.2)
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert saved.exists() and is_gone(pid)
    assert signal.signal(number, inherited) is signal.default_int_handler


def test_a_second_signal_ends_it_at_once(saved: Path) -> None:
    events, pid = begin(saved, takes_s=30.0)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert time.monotonic() - began < 10 and is_gone(pid) and not saved.exists()
