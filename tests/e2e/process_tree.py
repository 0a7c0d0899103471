"""Knows every process that a command left behind: the test process adopts the orphans, so none can hide."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from outrider.wire.processes.descendants import become_subreaper, descendants
from tests.forked import REPO, clean_environment, start_server


class Command:
    """A running command line. Lines of stdout and stderr are kept as they come."""

    def __init__(self, *args: str, stdin: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *args],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=clean_environment(),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, kept), daemon=True)
            for pipe, kept in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.flush()

    def _read(self, pipe: Any, kept: list[str]) -> None:
        with pipe:
            for line in pipe:
                kept.append(line.rstrip("\n"))
                self._lines.put(kept[-1])

    def wait_for(self, text: str, timeout_s: float = 240.0) -> str:
        """The first line, of either stream, that holds `text`."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if text in line:
                    return line
                continue
            if self.process.poll() is not None and self._lines.empty():
                break
        raise AssertionError(f"no line with {text!r} (exit code {self.process.poll()}):\n{self.log()}")

    def ready(self) -> dict[str, Any]:
        """The launcher's JSON line."""
        return dict(json.loads(self.wait_for('"event": "ready"')))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        return code

    def log(self) -> str:
        return "\n".join([*self.out[-40:], *self.err[-40:]])

    def end(self) -> None:
        """However the test went."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(45)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Tree:
    """The processes below this one that were not there when it was made."""

    def __init__(self) -> None:
        become_subreaper()
        start_server()
        self._before = set(descendants(os.getpid()))

    def now(self) -> dict[int, str]:
        """{pid: command line} of those that run."""
        found = [pid for pid in descendants(os.getpid()) if pid not in self._before]
        return {pid: name for pid in found if (name := command_line(pid))}

    def pids_of(self, text: str) -> list[int]:
        return [pid for pid, name in self.now().items() if text in name]

    def wait_empty(self, timeout_s: float) -> dict[int, str]:
        """Those still there after `timeout_s`; returns as soon as there are none."""
        give_up = time.monotonic() + timeout_s
        while self.now() and time.monotonic() < give_up:
            time.sleep(0.1)
        return self.now()

    def end_rest(self) -> None:
        """By pid, so that a failed test disturbs no other; and collect the adopted."""
        rest = self.now()
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_empty(5)


@contextlib.contextmanager
def tree() -> Iterator[Tree]:
    made = Tree()
    try:
        yield made
    finally:
        made.end_rest()


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
        return file.read().replace("\0", " ").strip()
    return ""
