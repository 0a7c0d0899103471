"""Start child processes that cannot outlive us, read their events, end them and all they left behind.

Also turns signals into a flag that code waits for, so that the order of stopping is ours, whatever was going on.
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
    """Return the signals that ask this process to stop. A SIGHUP that is ignored stays so: nohup means it."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGINT, signal.SIGTERM]
    return [*_STOPPING]


def ignore_log_rotation() -> None:
    """Ignore SIGUSR1, by which others have their logs opened anew: all parts log to stderr. For the main thread."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopRequested(Exception):
    """Raised where something was being waited for when the user, or the system, asked for the end."""


class StopFlag:
    """Set by SIGINT, SIGTERM and SIGHUP once `install` was called, or by `set`.

    A signal handler runs between any two instructions of the main thread, which may hold any lock, so that it takes
    none: a pipe wakes whoever waits. The interpreter writes to it, too, as soon as a signal comes: one that comes
    between the last instruction before a wait and the wait itself ends the wait.
    """

    def __init__(self) -> None:
        self.hurry = False
        """Whether a second signal came: stop without grace."""
        self._is_set = False
        self._is_installed = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __del__(self) -> None:
        if not self._is_installed:  # else the next signal would be written to whatever file has the number then
            os.close(self._reader)
            os.close(self._writer)

    def install(self) -> None:
        """Install handlers of `stop_signals`, from the main thread. Call again after a library has put its own in."""
        self._is_installed = True
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the signal handlers, from the main thread, for as long as the block lasts."""
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
        return self._is_set

    def notify(self) -> None:
        """End the `wait` that is going on, or the next one, from any thread: there is something else to look at."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the wait ends in any case
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, `notify` is called or any signal comes, at most `timeout_s`; return whether the
        flag is set. Of several threads that wait, `notify` reaches one, and the flag all.
        """
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)  # an event loop may have put its own in
        if self._is_set:
            return True
        readable = select.poll()
        readable.register(self._reader, select.POLLIN)
        if readable.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            self._drain()
        return self._is_set

    def check(self) -> None:
        """Raise StopRequested when the flag is set."""
        if self._is_set:
            raise StopRequested

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        if self._is_set:
            self.notify()  # for the other threads that wait

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        # No call between these two lines: a second signal would be handled in the middle, and not be seen as one.
        self.hurry = self.hurry or self._is_set
        self._is_set = True
        self.notify()


_KILLED_WITHIN_S = 10.0
"""Seconds for SIGKILL to end a process. Doubled, one that the kernel holds is waited for so much longer."""
_LOOK_S = 0.05
"""Seconds between two looks whether a child is to hurry. Doubled, a second signal reaches it so much later."""
_CLOSED_S = 0.5
"""Seconds for the kernel to end a process that has closed its stdout."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here, since little may safely be done in the forked child.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Event = dict[str, Any]
OnLog = Callable[[str, str], None]
"""Called with (name of the part, line) from a reader thread."""

LOOK_S = 1.0
"""Seconds between two looks whether a child lives, for one that ended while a child of its own held its stdout open."""
TAIL_LINES = 200
"""Lines of a child's log that are kept."""


class Child:
    """A process that reports with one JSON object a line on stdout and logs on stderr.

    It gets a process group of its own, so that a terminal's Ctrl-C reaches only us and the order of stopping is ours;
    not a session, between which Linux shares cores: beside one whose threads wake each other all the time, another
    was seen to get 19 % of a core in place of 48. The kernel sends it SIGTERM when we die, however we die. Start it
    from the main thread: the kernel takes the end of the starting *thread* for ours.
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
        """Start the process and write `stdin` at once; the open pipe's end then tells it that we are gone.

        notify: called from a thread when there is another event, and when the process has closed its stdout, which it
        does at the latest when it ends, unless a child of its own holds it open.
        """
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_log = on_log
        self._notify = notify
        self._asked_to_stop = False
        self.process = subprocess.Popen(
            list(args),
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # What lies in the user's folder under one of our names is none of our modules.
            env={**(os.environ if env is None else env), "PYTHONSAFEPATH": "1"},
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._readers = [
            self._start_reader(self._read_events, self.process.stdout),
            self._start_reader(self._read_log, self.process.stderr),
        ]
        if stdin is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died at once: `returncode` and `tail` say why
                self.process.stdin.write(stdin)
                self.process.stdin.flush()

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self.process.poll()

    def has_ended(self) -> bool:
        """Return whether it has ended; all its events are in `events` then. Waits shortly for their reader."""
        if self.returncode is None:
            return False
        self._readers[0].join(1.0)
        return True

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines of its log. Waits shortly for the readers when the process has ended."""
        if self.returncode is not None:
            for reader in self._readers:
                reader.join(1.0)
        return list(self.tail)[-count:]

    def ask_to_stop(self) -> None:
        """Send SIGTERM and close its stdin, once, without waiting."""
        if self._asked_to_stop:
            return
        self._asked_to_stop = True
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.terminate()

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False, hurried_grace_s: float = 0.0) -> None:
        """Ask it to stop, and send SIGKILL after `grace_s`. Does nothing to a process that has ended.

        Once `hurry` says so it is asked again, and has `hurried_grace_s` from then on.
        """
        self.ask_to_stop()
        give_up = time.monotonic() + grace_s
        hurried = False
        while self.process.poll() is None and time.monotonic() < give_up:
            if hurry() and not hurried:
                hurried = True
                self.process.terminate()
                give_up = min(give_up, time.monotonic() + hurried_grace_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(_LOOK_S, max(0.0, give_up - time.monotonic())))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Release the pipes. Call when everything that could hold their other ends has been ended."""
        for reader in self._readers:
            reader.join(1.0)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not any(reader.is_alive() for reader in self._readers):
                pipe.close()

    def _start_reader(self, read: Callable[[Iterable[str]], None], pipe: IO[str] | None) -> threading.Thread:
        thread = threading.Thread(target=read, args=(pipe or (),), name=f"read-{self.name}", daemon=True)
        thread.start()
        return thread

    def _read_events(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._event(line.rstrip("\n"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSED_S)
        self._notify()

    def _read_log(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log(line.rstrip("\n"))

    def _event(self, line: str) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict) and "event" in event:
            self.events.put(event)
            self._notify()
        else:
            self._log(line)

    def _log(self, line: str) -> None:
        self.tail.append(line)
        if self._on_log is not None:
            self._on_log(self.name, line)


def tell(event: Event) -> None:
    """Tell the parent an event, as a child: a line of JSON on stdout."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def tell_all(events: Callable[[], Iterable[Event]]) -> int:
    """Tell the parent events as they come, and at last what ended them before their time; return the exit code."""
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
        if os.getppid() != parent:  # we died before the kernel was asked
            os._exit(1)

    return prepare


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants, so that `end_descendants` finds them all.

    For processes that own all their children. Does nothing where the kernel is not Linux.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the pids of processes below `pid` that still run, nearest first; an empty list where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            # "pid (name) state ppid ...": the name may hold spaces and parentheses
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += below
    return found


def end_descendants(grace_s: float) -> list[int]:
    """End every process below this one by pid: SIGTERM, and SIGKILL after `grace_s`. Return those it had to end.

    With `become_subreaper` called first, none can have escaped by losing its parent.
    """
    ended: list[int] = []
    start = time.monotonic()
    while left := descendants(os.getpid()):
        elapsed_s = time.monotonic() - start
        if elapsed_s > grace_s + _KILLED_WITHIN_S:
            break
        new = [pid for pid in left if pid not in ended]
        ended += new
        _signal(left if elapsed_s >= grace_s else new, signal.SIGKILL if elapsed_s >= grace_s else signal.SIGTERM)
        time.sleep(0.02)
    _reap()
    return ended


def release_freed_memory() -> None:
    """Let glibc return what has been freed to the kernel, also from the middle of its heaps and those of threads."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap() -> None:
    """Collect the orphans that we adopted; nobody else does before we end."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
