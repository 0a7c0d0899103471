"""Child processes that end with this one: start them, read their events, end them and their descendants.

`StopFlag` turns signals into a flag that code waits for, so that a process stops its parts in an order of its own.
Used by launcher, workers and gateway.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from outrider.wire.errors import OutriderError

_STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop this process. SIGHUP is left out where it is ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGINT, signal.SIGTERM]
    return [*_STOPPING]


def ignore_log_rotation() -> None:
    """Ignore SIGUSR1, with which log rotation has a process open its log file anew: ours log to stderr. Call it in the
    main thread.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopRequested(Exception):
    """Raised by a wait that a signal to stop has ended."""


class StopFlag:
    """A flag that is set by `set`, and by SIGINT, SIGTERM and SIGHUP once `install` was called.

    A signal handler runs between any two instructions of the main thread, which may hold any lock. So the handler takes
    no lock, and wakes waiting threads by a pipe. The interpreter writes to the pipe as well when a signal arrives: one
    that arrives between the last instruction before a wait and the wait itself ends the wait.
    """

    def __init__(self) -> None:
        self.hurry = False
        """Whether a second signal has arrived: stop without grace."""
        self._is_set = False
        self._is_installed = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __del__(self) -> None:
        if not self._is_installed:  # else a later signal would be written to the file that has the number by then
            os.close(self._reader)
            os.close(self._writer)

    def install(self) -> None:
        """Install handlers of `stop_signals`, from the main thread. Call it again after a library installed its own."""
        self._is_installed = True
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the signal handlers during the block, from the main thread."""
        handlers = {number: signal.getsignal(number) for number in _STOPPING}
        wakeup_fd = signal.set_wakeup_fd(-1)
        self.install()
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_fd)
            self._is_installed = False

    def set(self) -> None:
        """Set the flag, from any thread."""
        self._is_set = True
        self.notify()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def notify(self) -> None:
        """End the current `wait`, or the next one, without setting the flag. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the wait ends in any case
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, `notify` is called or any signal arrives, at most `timeout_s` seconds (None = no
        limit). Return whether the flag is set.

        Of several waiting threads `notify` wakes one, and the flag all.
        """
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)  # an event loop may have put its own in
        if self._is_set:
            return True
        timeout_ms = None
        if timeout_s is not None:
            timeout_ms = max(0.0, timeout_s) * 1000
        readable = select.poll()
        readable.register(self._reader, select.POLLIN)
        if readable.poll(timeout_ms):
            self._drain()
        return self._is_set

    def check(self) -> None:
        """Raise StopRequested if the flag is set."""
        if self._is_set:
            raise StopRequested

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        if self._is_set:
            self.notify()  # for the other waiting threads

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        # No call between these two lines: a second signal could be handled there, and would be taken for the first.
        self.hurry = self.hurry or self._is_set
        self._is_set = True
        self.notify()


_KILL_TIMEOUT_S = 10.0
"""Seconds within which SIGKILL ends a process, unless the kernel holds it."""
_HURRY_POLL_S = 0.05
"""Seconds between two calls of `hurry` in `Child.stop`."""
_EXIT_TIMEOUT_S = 0.5
"""Seconds within which the kernel ends a process that has closed its stdout."""
_READER_TIMEOUT_S = 1.0
"""Seconds that a reader thread takes to read the pipe of a process that has ended."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that the kernel sends to a process when its parent ends."""
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl: the process becomes the parent of its orphaned descendants."""
_LIBC: ctypes.CDLL | None = None
if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, since little may safely be done in a forked child

Event = dict[str, Any]
"""An event of a child, a line of JSON: its name under "event", and the event's fields."""
OnLog = Callable[[str, str], None]
"""Called with (the child's name, a line of its log) from a reader thread."""

LOOK_S = 1.0
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


def tell(event: Event) -> None:
    """Write an event to stdout for the parent process, as `Child` reads it."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def tell_all(events: Callable[[], Iterable[Event]]) -> int:
    """Write events to stdout as they are made, and an event "failed" for an OutriderError. Return the exit code."""
    try:
        for event in events():
            tell(event)
    except OutriderError as error:
        tell({"event": "failed", "message": error.message})
        return 1
    return 0


def _die_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return prepare


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, so that `end_descendants` finds them all.

    For a process that owns all its children. Does nothing on a kernel other than Linux.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the pids of the running descendants of `pid`, children before grandchildren. Empty without /proc."""
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
    """End every descendant of this process: send SIGTERM, and after `grace_s` seconds SIGKILL. Return their pids.

    Call `become_subreaper` before any of them starts, so that none is lost with its parent.
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


def release_freed_memory() -> None:
    """Have glibc return freed memory to the kernel, from the middle of heaps and from threads' heaps too."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap() -> None:
    # Orphans that `become_subreaper` made children of this process stay zombies until it waits for them.
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
