"""`python forward_clock.py MODULE ...`: run a worker and count its forwards in the file that COUNTS_FILE names.

Run by its path, with the modules of any checkout. Writer and reader map the file, so reading costs the worker nothing,
and a forward costs it two readings of a clock and four stores.
"""

from __future__ import annotations

import mmap
import os
import runpy
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTS_FILE = "BENCH_FORWARD_COUNTS"
"""Environment variable with the path."""
_LAYOUT = struct.Struct("qqqd")


@dataclass(frozen=True)
class Forwards:
    """Forwards of a worker so far, or between two moments."""

    num_steps: int = 0
    num_slots: int = 0
    """Slots in each step, added up; a piece of a prompt counts as one."""
    num_tokens: int = 0
    """Tokens fed in each step, added up."""
    cpu_s: float = 0.0
    """CPU time of the thread that runs them: all of their work, on one core."""

    def since(self, before: Forwards) -> Forwards:
        """Return the forwards after `before`."""
        return Forwards(
            self.num_steps - before.num_steps,
            self.num_slots - before.num_slots,
            self.num_tokens - before.num_tokens,
            self.cpu_s - before.cpu_s,
        )


class ForwardCounts:
    """The counts in a file, which is made when it is missing."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_LAYOUT.pack(0, 0, 0, 0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def read(self) -> Forwards:
        return Forwards(*_LAYOUT.unpack(self._map))

    def write(self, counts: Forwards) -> None:
        _LAYOUT.pack_into(self._map, 0, counts.num_steps, counts.num_slots, counts.num_tokens, counts.cpu_s)


def count_forwards(counts: ForwardCounts) -> None:
    """Let every forward of this process be counted from now on."""
    from outrider.engine.model_runner import ModelRunner

    forward = ModelRunner.forward

    def counted(runner: ModelRunner, rows: Any) -> Any:
        began_s = time.thread_time()
        logits = forward(runner, rows)
        spent_s = time.thread_time() - began_s
        before = counts.read()
        num_tokens = before.num_tokens + sum(row.num_new for row in rows)
        counts.write(
            Forwards(before.num_steps + 1, before.num_slots + len(rows), num_tokens, before.cpu_s + spent_s),
        )
        return logits

    ModelRunner.forward = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    count_forwards(ForwardCounts(Path(os.environ[COUNTS_FILE])))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
