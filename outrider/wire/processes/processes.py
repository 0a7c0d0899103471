"""`Child`, a child process that ends with this one: start it, read its events, end it. Used by the launcher, `outrider
up` and processes that report to them (`tell`).
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
"""Seconds between two calls of `hurry` in `Child.stop`."""
_EXIT_TIMEOUT_S = 0.5
"""Seconds within which the kernel ends a process that has closed its stdout."""
_READER_TIMEOUT_S = 1.0
"""Seconds that a reader thread takes to read the pipe of a process that has ended."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that the kernel sends to a process when its parent ends."""

Event = dict[str, Any]
"""An event of a child, a line of JSON: its name under "event", and the event's fields."""
OnLog = Callable[[str, str], None]
"""Called with (the child's name, a line of its log) from a reader thread."""

POLL_S = 1.0
"""Seconds between two checks of a child's `has_ended`: no event reports the end of one whose own child holds its stdout
open."""
TAIL_LINES = 200
"""Lines of a child's log that are kept."""


class Child:
    """A child process that writes events, one JSON object a line, to stdout, and its log to stderr.

    It has a process group of its own, so that a terminal's Ctrl-C reaches this process alone, which then stops its
    children in order. It has no session of its own: Linux shares cores between sessions, and beside one whose threads
    wake each other all the time another got 19 % of a core instead of 48 %. The kernel sends it SIGTERM when this
    process ends, however it ends. Start it from the main thread: the kernel takes the end of the starting *thread* for
    the end of this process.
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

        name: for log lines. stdin: a text that is written to its stdin, which then stays open until this process ends;
        None = no stdin. env: its environment; None = this process's. on_log: called with each line of its log. notify:
        called from a thread after each event, and after the process has closed its stdout: at the latest at its end,
        unless a child of its own holds the pipe open.
        """
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of its log."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        """Events that nobody has taken yet."""
        self._on_log = on_log
        self._notify = notify
        self._was_asked_to_stop = False
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
        """The exit code; None while it runs, -N if signal N ended it."""
        return self.process.poll()

    def has_ended(self) -> bool:
        """Return whether it has ended; then all its events are in `events`. Waits up to a second for their reader."""
        if self.returncode is None:
            return False
        self._readers[0].join(_READER_TIMEOUT_S)
        return True

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines of its log. Of a process that has ended it waits up to a second for each
        reader.
        """
        if self.returncode is not None:
            self._join_readers()
        return list(self.tail)[-count:]

    def ask_to_stop(self) -> None:
        """Close its stdin and send SIGTERM, without waiting. A second call does nothing."""
        if self._was_asked_to_stop:
            return
        self._was_asked_to_stop = True
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.terminate()

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False, hurried_grace_s: float = 0.0) -> None:
        """Call `ask_to_stop` and wait for the end; send SIGKILL after `grace_s` seconds.

        Once `hurry()` is true, SIGTERM is sent a second time, and SIGKILL `hurried_grace_s` seconds later at the
        latest. Does nothing to a process that has ended.
        """
        self.ask_to_stop()
        kill_s = time.monotonic() + grace_s
        is_hurried = False
        while self.process.poll() is None and time.monotonic() < kill_s:
            if hurry() and not is_hurried:
                is_hurried = True
                self.process.terminate()
                kill_s = min(kill_s, time.monotonic() + hurried_grace_s)
            remaining_s = max(0.0, kill_s - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(_HURRY_POLL_S, remaining_s))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Close the pipes. Call it when every process that could hold their other ends has ended."""
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
    """Write an event to stdout for the parent process, as `Child` reads it."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def write_events(events: Callable[[], Iterable[Event]]) -> int:
    """Write events to stdout as they are made, and an event "failed" for an OutriderError. Return the exit code."""
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
    """Have glibc return freed memory to the kernel, from the middle of heaps and from threads' heaps too."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
