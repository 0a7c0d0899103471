"""CPU time and memory of the gateway and of the processes that it has started, from /proc."""

import contextlib
import os
import time
from pathlib import Path

from outrider.wire.processes.descendants import descendants

WINDOW_S = 0.25
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_of(pid: int) -> list[int]:
    """Return the process and all below it."""
    return [pid, *descendants(pid)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all below it, those that have ended and were waited for included."""
    total = 0
    for each in tree_of(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(ticks) for ticks in fields[11:15])  # utime, stime, cutime, cstime
    return total / TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it. What they share is counted once."""
    total = 0
    for each in tree_of(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
            sizes = dict(line.split(":", 1) for line in lines)
            total += int(sizes["Pss"].split()[0]) * 1024
    return total


def busy(pid: int, seconds: float) -> float:
    """Return how many cores the process and all below it use over the next seconds."""
    before, began_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began_s)


def idle_after_s(pid: int, max_idle_cores: float, give_up_s: float) -> float:
    """Return the seconds until the process and all below it use less than so much of a core; give_up_s at most.

    They are idle when two windows in a row say so: on a busy machine one may be short of CPU time.
    """
    began_s = idle_since_s = time.monotonic()
    num_idle = 0
    while time.monotonic() - began_s < give_up_s:
        if busy(pid, WINDOW_S) >= max_idle_cores:
            num_idle, idle_since_s = 0, time.monotonic()
            continue
        num_idle += 1
        if num_idle == 2:
            return idle_since_s - began_s
    return give_up_s


def forget_peak(pid: int) -> None:
    """Let the peaks of memory begin anew."""
    for each in tree_of(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{each}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Return the sum of the peaks of resident memory of the process and of those below it that still run."""
    total = 0
    for each in tree_of(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total
