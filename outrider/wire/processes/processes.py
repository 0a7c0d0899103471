"""`Child`, a child process that ends together with this process: start it, read its events, end it. Used by the
launcher and `outrider up`; their child processes report to them by `write_event`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from outrider.wire.errors import OutriderError
from outrider.wire.processes.descendants import LIBC

_HURRY_POLL_S = 0.05
"""Seconds between two calls of `is_hurried` in `Child.stop`."""
_EXIT_TIMEOUT_S = 0.5
"""Seconds to wait for the end of a child that has closed its stdout."""
_READER_TIMEOUT_S = 1.0
"""Seconds to wait until a reader thread has read the rest of an ended child's pipe."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that the kernel sends to a process when its parent ends."""

Event = dict[str, Any]
"""An event that a child process reports as one line of JSON. Its name is under the key "event", and further keys depend
on the name."""
OnLog = Callable[[str, str], None]
"""Callback for each line of a child's log: `on_log(name of the child, line)`, called on a reader thread."""

POLL_S = 1.0
"""Seconds between two calls of `Child.has_ended` by the process that started the child. Polling is needed because
`notify` is not called at the end of a child whose stdout is still held open by a child process of its own."""
TAIL_LINES = 200
"""Maximum number of lines at the end of a child's log that `Child.tail` keeps."""


class Child:
    """A child process that writes events to stdout, one JSON object per line, and its log to stderr.

    The child has its own process group: Ctrl-C in a terminal then reaches only this process, which stops its children
    in order. The child stays in this process's session, because Linux divides cores among sessions: a child in a new
    session got 19 % of a busy core instead of 48 %. When this process ends, even by a crash, the kernel sends SIGTERM
    to the child. It also does so when the thread that started the child ends, so start children from the main thread.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        *,
        stdin: str | None = None,
        on_log: OnLog | None = None,
        notify: Callable[[], None] = lambda: None,
        env: Mapping[str, str] | None = None,
    ):
        """Start the process.

        name: name of the child for `on_log`. args: its command line. stdin: text to write to its stdin, which then
        stays open until this process ends; None = it has no stdin. env: its environment; None = that of this process.
        on_log: called with each line of its log. notify: called on a reader thread after each event, and once the child
        has closed its stdout. That is at its end at the latest, unless a child of its own holds the pipe open.
        """
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of the child's log, at most TAIL_LINES."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        """Events of the child that were not read yet, oldest first."""
        self._on_log = on_log
        self._notify = notify
        self._is_stop_requested = False
        if env is None:
            env = os.environ
        stdin_kind = subprocess.DEVNULL
        if stdin is not None:
            stdin_kind = subprocess.PIPE
        self.process = subprocess.Popen(
            list(args),
            stdin=stdin_kind,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Without it a file in the user's folder would be imported in place of our module of that name.
            env={**env, "PYTHONSAFEPATH": "1"},
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._readers = [
            self._start_reader(self._read_events, self.process.stdout),
            self._start_reader(self._read_log, self.process.stderr),
        ]
        if stdin is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: `returncode` and `tail` have the reason
                self.process.stdin.write(stdin)
                self.process.stdin.flush()

    @property
    def returncode(self) -> int | None:
        """Exit code of the child; None = it still runs, -N = signal N ended it."""
        return self.process.poll()

    def has_ended(self) -> bool:
        """Return whether the child has ended. If it has, first wait up to a second until all events that it wrote are
        in `events`.
        """
        if self.returncode is None:
            return False
        self._readers[0].join(_READER_TIMEOUT_S)
        return True

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines of the child's log. If the child has ended, first wait up to a second for each
        of the two threads that read its stdout and stderr.
        """
        if self.returncode is not None:
            self._join_readers()
        return list(self.tail)[-count:]

    def request_stop(self) -> None:
        """Close the child's stdin and send SIGTERM to it, without waiting. A second call does nothing."""
        if self._is_stop_requested:
            return
        self._is_stop_requested = True
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.terminate()

    def stop(
        self, grace_s: float, is_hurried: Callable[[], bool] = lambda: False, hurried_grace_s: float = 0.0
    ) -> None:
        """Ask the child to stop and wait for its end. After `grace_s` seconds send SIGKILL.

        As soon as `is_hurried()` returns true, SIGTERM is sent a second time, and SIGKILL at most `hurried_grace_s`
        seconds after that. Does nothing if the child has ended.
        """
        self.request_stop()
        kill_s = time.monotonic() + grace_s
        has_terminated = False
        while self.process.poll() is None and time.monotonic() < kill_s:
            if is_hurried() and not has_terminated:
                has_terminated = True
                self.process.terminate()
                kill_s = min(kill_s, time.monotonic() + hurried_grace_s)
            remaining_s = max(0.0, kill_s - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(_HURRY_POLL_S, remaining_s))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Close the pipes to the child. Call it only after the child and all its descendants have ended, since they may
        hold the other ends.
        """
        self._join_readers()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not any(reader.is_alive() for reader in self._readers):
                pipe.close()

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(_READER_TIMEOUT_S)

    def _start_reader(self, read: Callable[[Iterable[str]], None], pipe: IO[str] | None) -> threading.Thread:
        thread = threading.Thread(target=read, args=(pipe or (),), name=f"read-{self.name}", daemon=True)
        thread.start()
        return thread

    def _read_events(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._add_event(line.rstrip("\n"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
        self._notify()

    def _read_log(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._add_log_line(line.rstrip("\n"))

    def _add_event(self, line: str) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict) and "event" in event:
            self.events.put(event)
            self._notify()
        else:
            self._add_log_line(line)

    def _add_log_line(self, line: str) -> None:
        self.tail.append(line)
        if self._on_log is not None:
            self._on_log(self.name, line)


def write_event(event: Event) -> None:
    """Write an event to stdout as one line of JSON, for a parent process that reads it by `Child`."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def write_events(events: Callable[[], Iterable[Event]]) -> int:
    """Write each event that `events()` yields to stdout at once. Return the exit code for this process: 0, or 1 if an
    OutriderError was raised. In that case write an event "failed" with the error's message.
    """
    try:
        for event in events():
            write_event(event)
    except OutriderError as error:
        write_event({"event": "failed", "message": error.message})
        return 1
    return 0


def _die_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        if LIBC is None:
            return
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return prepare


def release_freed_memory() -> None:
    """Return the memory that was freed in this process to the kernel (glibc's malloc_trim), including free memory
    inside heaps and in the heaps of threads.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
