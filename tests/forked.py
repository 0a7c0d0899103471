"""`python -m MODULE ARGS` as a process forked from one that has imported torch and transformers.

A worker's start is five seconds of imports and half a second of its own; tests start two hundred. A fork runs the same
code from the first line of `MODULE/__main__.py` on. `tests/e2e/test_incompatible_pair.py`, `test_demo.py` and
`test_up.py` start the commands as users do. An argument @MODULE.NAME=VALUE is no argument: it replaces a constant.
"""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
REPO = Path(__file__).resolve().parent.parent


def start_server() -> None:
    """It starts by itself with the first process; this is for who counts processes."""
    forkserver.ensure_running()


def clean_environment() -> dict[str, str]:
    """Without settings of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}


class Forked:
    """What `subprocess.Popen` is for a command: `pid`, `stdout` (text), and its methods by the same names."""

    def __init__(
        self, module: str, args: list[str], stderr: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """stderr: a file to append to; nowhere without."""
        received, sent = CONTEXT.Pipe(duplex=False)
        settings = (module, args, sent, str(stderr or os.devnull), dict(env or clean_environment()))
        # A daemon is ended with the tests, should one of them forget it.
        self._process = CONTEXT.Process(target=_run, args=settings, daemon=True)
        self._process.start()
        sent.close()
        self.stdout = os.fdopen(os.dup(received.fileno()), encoding="utf-8")
        received.close()
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        """Negative for a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run(module: str, *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 100.0) -> Ended:
    """Start it and wait for its end. Raises subprocess.TimeoutExpired; the process is killed then."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        process = Forked(module, list(args), log, env)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
        with process.stdout as stdout:
            return Ended(process.wait(10), stdout.read(), log.read_text())


def _run(module: str, args: list[str], stdout: Connection, stderr: str, env: dict[str, str]) -> None:
    """In the forked process."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, and commands leave SIGHUP to it then
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    log = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(REPO)
    for place, value in (arg[1:].split("=") for arg in args if arg.startswith("@")):
        owner, name = place.rsplit(".", 1)
        found = importlib.import_module(owner)
        setattr(found, name, type(getattr(found, name))(value))
    sys.argv = [module, *(arg for arg in args if not arg.startswith("@"))]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
