"""`python deploy/docker/stay.py PROCESS`: runs as long as this container's raylet or, at the head, its gcs_server.

On SIGTERM it drains the container's workers and ends that process. A raylet gets SIGTERM and reports its end to the
head, which at once places its workers on other nodes. A gcs_server has no head to report to, and that of Ray 2.60 waits
for ever for a dashboard to take its events: it is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from deploy.node_drain import FOLDER, drain_workers
from outrider.wire.processes.stop_flag import StopFlag

_END = {"raylet": signal.SIGTERM, "gcs_server": signal.SIGKILL}
"""Signal that ends each of these programs of Ray."""
_LOOK_S = 0.05
"""Seconds between two checks whether workers have drained or a second signal came."""


def pid_of(program: str) -> int:
    """Return the id of the process in this container that runs `program`, one of Ray's executables such as raylet.
    Raises LookupError if none runs it.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "cmdline").read_text().split("\0")[0].endswith(f"/{program}"):
            return int(folder.name)
    raise LookupError(f"no {program} runs here; start one with `ray start`")


def stay(pid: int, program: str, folder: Path) -> int:
    """Wait until process `pid` has ended. On a first SIGTERM, SIGINT or SIGHUP, drain the container's workers and then
    end `pid`; on a second one, end `pid` at once. Return the exit code: 0 after a signal, 1 if `pid` ended by itself.

    program: name of Ray's executable that `pid` runs. folder: folder of the sockets of this container's workers.
    """
    process = os.pidfd_open(pid)
    stop = StopFlag()
    stop.install()
    ended = threading.Event()
    drained = threading.Event()

    def await_end() -> None:
        select.select([process], [], [])
        ended.set()
        stop.notify()

    def drain() -> None:
        drain_workers(folder)
        drained.set()

    threading.Thread(target=await_end, daemon=True).start()
    while not ended.is_set() and not stop.wait():
        pass
    if not stop.is_set():
        sys.stderr.write(f"node: Ray's {program} ended by itself\n")
        return 1
    threading.Thread(target=drain, daemon=True).start()
    while not (drained.is_set() or stop.is_hurried or ended.is_set()):
        time.sleep(_LOOK_S)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, _END[program])
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(stay(pid_of(sys.argv[1]), sys.argv[1], Path(os.environ[FOLDER])))
