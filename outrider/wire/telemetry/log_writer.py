"""`LogWriter`, which writes lines on a thread of its own, so that a slow reader of the log does not block the process.
Used by `log` and by `outrider up`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

MAX_WAITING_LINES = 4096
"""Lines in the queue: some 600 KB of requests' lines."""
FLUSH_S = 1.0
"""Seconds that a process waits at its end until its last lines are written."""


class LogWriter:
    """Writes lines to one descriptor. A line that does not fit into the queue or cannot be written is dropped and
    counted.
    """

    def __init__(self, descriptor: int, format_dropped: Callable[[int], str], others: Sequence[int] = ()) -> None:
        """Start the thread.

        format_dropped: returns the line for a number of dropped lines. others: descriptors of the same file, to which C
        libraries and Python itself write; they lead to /dev/null for as long as the file accepts nothing.
        """
        self.format_dropped = format_dropped
        self.others = others
        self._descriptor = descriptor
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        # SimpleQueue: its `put` may interrupt another `put`, as destructors log too.
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        """Lines to write, and events to set when all lines before them are written."""
        self._lock = threading.RLock()
        self._num_refused = 0
        """Lines for which the queue was full."""
        self._num_failed = 0
        """Lines that could not be written."""
        self._num_reported = 0
        """Dropped lines that a line in the log has reported."""
        self._is_given_up = False
        """Whether a `flush` took longer than FLUSH_S."""
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.flush)

    @property
    def num_dropped(self) -> int:
        """Number of lines that were dropped so far."""
        return self._num_refused + self._num_failed

    def put(self, text: str, *, is_last_word: bool = False) -> None:
        """Queue a line that ends in a newline, or drop it if the queue is full. Returns at once; any thread may call.

        is_last_word: queue it even then, as the line that has the reason for the end of the process.
        """
        with self._lock:
            if is_last_word or self._lines.qsize() < MAX_WAITING_LINES:
                self._lines.put(text)
            else:
                self._num_refused += 1

    def flush(self) -> None:
        """Wait until the queue is written, for at most FLUSH_S. After one wait that was too short it returns at
        once."""
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
        # Returns whether all of the text was written: a disk may be full, or the reader of a pipe may have ended.
        data = text.encode("utf-8", "backslashreplace")
        try:
            while True:
                self._await_room()  # after the last piece too: C libraries write there, and would block if it were full
                if not data:
                    return True
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError:
            return False

    def _await_room(self) -> None:
        # Until PIPE_BUF bytes can be written without blocking.
        if self._writable.poll(0):
            return
        for other in self.others:
            os.dup2(self._nowhere, other, os.get_inheritable(other))
        self._writable.poll()
        for other in self.others:
            os.dup2(self._descriptor, other, os.get_inheritable(other))
