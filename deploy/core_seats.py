"""Cores of the machine that a worker runs on, taken by the worker itself: so it finds others' after a restart too.

A seat is a locked file, so it is free as soon as its holder's process has ended, however that was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

_LEVELS = 256
_QUOTA_FILES = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))


def is_limited() -> bool:
    """Whether a quota of CPU time is set, as for containers: their cores are shared with others that cannot be seen."""
    for path in _QUOTA_FILES:
        with contextlib.suppress(OSError):
            return path.read_text().split()[0] not in ("max", "-1")
    return False


def take_cores(count: int, folder: Path | None = None, offered: frozenset[int] | None = None) -> frozenset[int]:
    """The `count` least occupied of the offered cores, kept until this process ends; all of them where they are fewer.

    `folder`: where the workers of a machine meet; None = the user's own in the system's folder for such. `offered`:
    None = those that this process may run on.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"outrider-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0) if offered is None else offered)
    taken: set[int] = set()
    for level in range(_LEVELS):
        for core in cores:
            if len(taken) >= min(count, len(cores)):
                return frozenset(taken)
            if core not in taken and _sit(folder / f"{core}.{level}"):
                taken.add(core)
    return frozenset(cores)  # nobody has that many workers


def _sit(path: Path) -> bool:
    """Whether the seat was free. Its file stays open, and with it the lock, for the life of the process."""
    seat = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(seat)
        return False
    return True
