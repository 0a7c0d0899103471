"""Start processes of a checkout by hand, for benchmarks that choose cores and modules themselves; ends them too.

`benchmarks.running` starts a whole system as `outrider up` does, and is the simpler way.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.wire.processes.processes import Child

START_S = 180.0
"""Seconds that a process may take to start."""


@dataclass(frozen=True)
class Checkout:
    """A tree of Outrider and what runs it."""

    tree: Path
    python: str
    """Path of the interpreter."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes: its own modules come first, and no setting of ours reaches them."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        return bare | {"PYTHONPATH": str(self.tree)}


def checkout_at(tree: Path) -> Checkout:
    """Return a checkout, with the environment in it or else this one. Ends this process when its code would not run."""
    own = tree / ".venv/bin/python"
    found = Checkout(tree.resolve(), str(own if own.exists() else sys.executable))
    command = [found.python, "-c", "import outrider; print(outrider.__file__)"]
    made = subprocess.run(command, cwd="/", env=found.environment, check=True, stdout=subprocess.PIPE, text=True)
    if not Path(made.stdout.strip()).is_relative_to(found.tree):
        sys.exit(f"the code of {found.tree} was to run, and {made.stdout.strip()} is what is imported")
    return found


def start(checkout: Checkout, module: str, args: Sequence[str], cores: Sequence[int]) -> Child:
    """Start a module of a checkout on these cores."""
    pinned = ["taskset", "-c", ",".join(map(str, cores)), checkout.python, "-m", module, *args]
    return Child(module, pinned, stdin="", env=checkout.environment)


def next_event(child: Child, timeout_s: float = START_S) -> Mapping[str, Any]:
    """Return the next event of a process. Ends this one where there is none: its log says why."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        with contextlib.suppress(queue.Empty):
            return child.events.get(timeout=0.2)
        if child.returncode is not None:
            break
    sys.exit(f"{child.name} does not start:\n" + "\n".join(child.last_lines(30)))


@contextlib.contextmanager
def ended_with_block(children: list[Child]) -> Iterator[list[Child]]:
    """End all processes that the list then holds, the last first."""
    try:
        yield children
    finally:
        for child in reversed(children):
            child.request_stop()
        for child in reversed(children):
            child.stop(grace_s=15.0)
            child.close()
