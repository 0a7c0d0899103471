"""Writes lines on a thread of its own, so that whoever reads a log cannot hold up who logs. Used by `log` and `up`."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

MAX_WAITING_LINES = 4096
"""Lines that wait to be written: some 600 KB of requests' lines."""
FLUSH_S = 1.0
"""Seconds that the end of a process may wait until its last lines are written."""


class LogWriter:
    """Writes to one descriptor. A line that finds the queue full, or that cannot be written, is dropped and counted."""

    def __init__(self, descriptor: int, format_dropped: Callable[[int], str], others: Sequence[int] = ()) -> None:
        """Start the thread.

        format_dropped: returns the line that says how many were dropped. others: descriptors of the same file, to which
        C libraries and Python itself write; they are turned to /dev/null for as long as the file takes nothing.
        """
        self.format_dropped = format_dropped
        self.others = others
        self._descriptor = descriptor
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        # SimpleQueue, for its put may be interrupted by one: destructors log, too.
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()
        self._num_refused = 0
        self._num_failed = 0
        self._num_reported = 0
        self._is_given_up = False
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.flush)

    @property
    def num_dropped(self) -> int:
        """Return how many lines were dropped so far."""
        return self._num_refused + self._num_failed

    def put(self, text: str, *, is_last_word: bool = False) -> None:
        """Queue a line, with its newline, and return at once, on any thread. Drop it where the queue is full.

        is_last_word: queue it in any case, such as the line that says why the process ends.
        """
        with self._lock:
            if is_last_word or self._lines.qsize() < MAX_WAITING_LINES:
                self._lines.put(text)
            else:
                self._num_refused += 1

    def flush(self) -> None:
        """Wait until the queue is written, for at most FLUSH_S. Return at once where that was too short before."""
        if self._is_given_up:
            return
        written = threading.Event()
        self._lines.put(written)
        self._is_given_up = not written.wait(FLUSH_S)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, str) and not self._write(item):
                self._num_failed += 1
            if self._lines.empty():
                self._report_dropped()
            if isinstance(item, threading.Event):
                item.set()

    def _report_dropped(self) -> None:
        num_dropped = self.num_dropped
        if num_dropped > self._num_reported and self._write(self.format_dropped(num_dropped - self._num_reported)):
            self._num_reported = num_dropped

    def _write(self, text: str) -> bool:
        """Return whether all of the text was written: a disk may be full, and the reader of a pipe gone."""
        data = text.encode("utf-8", "backslashreplace")
        try:
            while True:
                self._await_room()  # after the last piece, too: others write there, and must not find it full
                if not data:
                    return True
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError:
            return False

    def _await_room(self) -> None:
        """Wait until PIPE_BUF bytes can be written at once."""
        if self._writable.poll(0):
            return
        for other in self.others:
            os.dup2(self._nowhere, other, os.get_inheritable(other))
        self._writable.poll()
        for other in self.others:
            os.dup2(self._descriptor, other, os.get_inheritable(other))
