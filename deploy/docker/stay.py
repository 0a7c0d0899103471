"""`python deploy/docker/stay.py`: lasts as long as this container's raylet, to which SIGTERM is passed on.

A raylet that is asked to end tells the head, so that its workers are placed elsewhere without waiting for silence.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path


def raylet_pid() -> int:
    """Raises LookupError when there is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet"):
            return int(folder.name)
    raise LookupError("no raylet runs here; start one with `ray start`")


def main() -> int:
    pid = raylet_pid()
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        os.kill(pid, signal.SIGTERM)

    ended = os.pidfd_open(pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    select.select([ended], [], [])
    if asked:
        return 0
    sys.stderr.write("node: the raylet ended by itself\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
