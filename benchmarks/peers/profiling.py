"""Show what a worker's Python does while it serves, by py-spy where it is installed: `bench-peers --profile`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

RATE_HZ = 200
TOP = 8


def program() -> str | None:
    """Return py-spy's path, in this environment or on the PATH, or None."""
    return shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def while_running(py_spy: str, pid: int, work: Callable[[], None]) -> list[tuple[str, float]]:
    """Return the innermost functions of the engine thread while `work` ran, with their shares, the largest first.

    A function that calls into torch or into our own kernels is charged with their time; `Condition.wait` and
    `EngineThread._drain` are the thread waiting for work.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        command = [py_spy, "record", "--pid", str(pid), "--format", "raw", "--output", str(out)]
        recorder = subprocess.Popen(
            [*command, "--rate", str(RATE_HZ), "--duration", "600"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            work()
        finally:
            recorder.send_signal(2)  # as Ctrl-C: it then writes what it has
            recorder.wait(30)
        return shares(out.read_text(encoding="utf-8")) if out.exists() else []


def shares(stacks: str) -> list[tuple[str, float]]:
    """Return functions and shares from py-spy's raw format: `frame;frame;frame count` a line, innermost frame last."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any("engine_thread" in frame for frame in frames):
            counts[frames[-1]] += int(count)
    total = sum(counts.values())
    return [(frame, count / total) for frame, count in counts.most_common(TOP)]
