"""The descendants of a process: find them and end them. Used by the launcher and `outrider up`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_KILL_TIMEOUT_S = 10.0
"""Seconds to wait for the end of a process after SIGKILL. It takes longer only if the process is stuck in the kernel.
"""
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl by which a process becomes the parent of its orphaned descendants."""
LIBC: ctypes.CDLL | None = None
"""The loaded C library; None on systems other than Linux."""
if sys.platform == "linux":
    LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, since little may safely be done in a forked child


def become_subreaper() -> None:
    """Make this process the parent of those descendants whose own parent ends, so that `end_descendants` finds all of
    them.

    Only for a process that may end all its children. Does nothing on systems other than Linux.
    """
    if LIBC is not None:
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the pids of the running descendants of process `pid`, children before grandchildren. The list is empty on
    systems without /proc.
    """
    children = _running_children()
    found: list[int] = []
    pending = [pid]
    while pending:
        next_pids = children.get(pending.pop(0), [])
        found += next_pids
        pending += next_pids
    return found


def _running_children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}  # by the parent's pid
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            # "pid (name) state ppid ...": the name may hold spaces and parentheses
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    return children


def end_descendants(grace_s: float) -> list[int]:
    """End every descendant of this process: send SIGTERM, and SIGKILL to those that still run after `grace_s` seconds.
    Return the pids of the descendants.

    Call `become_subreaper` before the first of them starts. Otherwise a descendant whose parent has ended is not found.
    """
    ended: list[int] = []
    start_s = time.monotonic()
    while remaining := descendants(os.getpid()):
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > grace_s + _KILL_TIMEOUT_S:
            break
        new = [pid for pid in remaining if pid not in ended]
        ended += new
        if elapsed_s >= grace_s:
            _signal(remaining, signal.SIGKILL)
        else:
            _signal(new, signal.SIGTERM)
        time.sleep(0.02)
    _reap()
    return ended


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap() -> None:
    # Orphans that `become_subreaper` made children of this process stay zombies until it waits for them.
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
