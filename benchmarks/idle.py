"""`python -m benchmarks.idle`: processor time of each process of a system that nobody uses, with Ray and without."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.footprint import kind_of
from benchmarks.up_processes import Up, serving

SETTLE_S = 10.0
"""Seconds after the start in which caches fill and connections are made."""
_WORKER = "ray::WorkerActor"
_RAY_THREADS = (
    "client.poll",
    "server.poll",
    "worker.io",
    "nexting_thread",
    "task_event_buff",
    "timer_manager",
    "ray::W",
)
"""Beginnings of the names of the threads that Ray has in a launcher and in a worker, whose first thread is Ray's."""


@dataclass(frozen=True)
class Spent:
    """What a process has used so far."""

    what: str
    is_ours: bool
    cpu_s: float


def spent(pid: int) -> Spent:
    """Return what a process is and has used. Raises OSError when there is none.

    Of the launcher and of a worker that is Ray's actor all threads count but Ray's.
    """
    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    if words[0].startswith(_WORKER):
        return Spent("worker, without Ray's threads", True, _cpu_s_of_own_threads(pid))
    if "deploy.launcher" in words:
        return Spent("launcher, without Ray's threads", True, _cpu_s_of_own_threads(pid))
    if "outrider" in words and "up" in words:
        return Spent("outrider up", True, _cpu_s(Path(f"/proc/{pid}")))
    kind = kind_of(words)
    is_ours = kind is not None and not kind.startswith("Ray")
    return Spent(kind or words[0].rpartition("/")[2], is_ours, _cpu_s(Path(f"/proc/{pid}")))


def _cpu_s(folder: Path) -> float:
    # "pid (name) state ...": fields 14 and 15 are utime and stime, in ticks; the name may hold spaces
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_s_of_own_threads(pid: int) -> float:
    total_s = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            if not (thread / "comm").read_text().startswith(_RAY_THREADS):
                total_s += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return total_s


def measure(up: Up, seconds: float) -> list[tuple[Spent, float]]:
    """Return each process with its share of one core over `seconds`."""
    before = _all_spent(up)
    time.sleep(seconds)
    after = _all_spent(up)
    return [(after[pid], (after[pid].cpu_s - before[pid].cpu_s) / seconds) for pid in before.keys() & after.keys()]


def _all_spent(up: Up) -> dict[int, Spent]:
    found = {}
    for pid in up.pids():
        with contextlib.suppress(OSError):
            found[pid] = spent(pid)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    for title, args in (("without Ray", ["--no-ray"]), ("with Ray", [])):
        with serving(*args) as up:
            time.sleep(SETTLE_S)
            shares = measure(up, options.seconds)
        print(f"\n{title}: % of one core over {options.seconds:g} s")
        for one, share in sorted(shares, key=lambda found: (not found[0].is_ours, found[0].what)):
            print(f"  {100 * share:6.2f}  {'' if one.is_ours else '(not ours) '}{one.what}")
        print(f"  {100 * sum(share for one, share in shares if one.is_ours):6.2f}  ours together")


if __name__ == "__main__":
    main()
