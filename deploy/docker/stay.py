"""`python deploy/docker/stay.py PROCESS`: lasts as long as this container's raylet, or gcs_server at the head.

On SIGTERM its workers drain, then it ends.

A raylet that is asked to end tells the head, so that its workers are placed elsewhere without waiting for silence.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from deploy.node_drain import FOLDER, drain_workers


def pid_of(program: str) -> int:
    """Return the process id of a program of Ray's in this container. Raises LookupError when there is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "cmdline").read_text().split("\0")[0].endswith(f"/{program}"):
            return int(folder.name)
    raise LookupError(f"no {program} runs here; start one with `ray start`")


def stay(pid: int, folder: Path) -> int:
    """Wait until the raylet `pid` has ended. Return the exit code: 0 after a signal.

    A second signal does not wait for the workers that listen in `folder`.
    """
    raylet = os.pidfd_open(pid)
    asked: list[int] = []

    def end_raylet() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(raylet, signal.SIGTERM)

    def drain_first() -> None:
        drain_workers(folder)
        end_raylet()

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            threading.Thread(target=drain_first, daemon=True).start()
        else:
            end_raylet()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    select.select([raylet], [], [])
    if asked:
        return 0
    sys.stderr.write("node: the raylet ended by itself\n")
    return 1


if __name__ == "__main__":
    sys.exit(stay(pid_of(sys.argv[1]), Path(os.environ[FOLDER])))
