"""`LogWriter`, which writes log lines on its own thread, so that a slow reader of the log does not block the process.
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
"""Maximum number of log lines in the queue of a LogWriter. This many lines about requests take some 600 KB."""
FLUSH_S = 1.0
"""Maximum seconds that a process waits at its end until the last lines of its log are written."""


class LogWriter:
    """Writes log lines to a file descriptor on its own thread. A line is dropped and counted if the queue is full or
    the line cannot be written.
    """

    def __init__(
        self, descriptor: int, format_dropped: Callable[[int], str], other_descriptors: Sequence[int] = ()
    ) -> None:
        """Start the thread.

        descriptor: file descriptor to write to. format_dropped: returns the log line that reports a given number of
        dropped lines. other_descriptors: descriptors of the same file, to which C libraries and Python itself write.
        While the file accepts no data, they are redirected to /dev/null.
        """
        self.format_dropped = format_dropped
        self.other_descriptors = other_descriptors
        self._descriptor = descriptor
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        # SimpleQueue: its `put` may interrupt another `put`, as destructors log too.
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        """Lines to write, and events to set once all lines before them are written."""
        self._lock = threading.RLock()
        self._num_refused = 0
        """Number of lines that were dropped because the queue was full."""
        self._num_failed = 0
        """Number of lines that could not be written."""
        self._num_reported = 0
        """Number of dropped lines that were already reported in the log."""
        self._has_timed_out = False
        """Whether a `flush` has taken longer than FLUSH_S, so that later ones do not wait."""
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.flush)

    @property
    def num_dropped(self) -> int:
        """Number of lines dropped since the writer was made."""
        return self._num_refused + self._num_failed

    def put(self, text: str, *, is_last_word: bool = False) -> None:
        """Queue a line, which must end in a newline. If the queue is full, drop the line. Returns at once; any thread
        may call it.

        is_last_word: queue the line even if the queue is full. It is for the line that says why the process ends.
        """
        with self._lock:
            if is_last_word or self._lines.qsize() < MAX_WAITING_LINES:
                self._lines.put(text)
            else:
                self._num_refused += 1

    def flush(self) -> None:
        """Wait at most FLUSH_S seconds until all queued lines are written. If a call has waited in vain, all later
        calls return at once.
        """
        if self._has_timed_out:
            return
        written = threading.Event()
        self._lines.put(written)
        self._has_timed_out = not written.wait(FLUSH_S)

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
                # After the last piece too: C libraries write there, and would block if it were full.
                self._await_writable()
                if not data:
                    return True
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError:
            return False

    def _await_writable(self) -> None:
        # Until PIPE_BUF bytes can be written without blocking.
        if self._writable.poll(0):
            return
        for other in self.other_descriptors:
            os.dup2(self._nowhere, other, os.get_inheritable(other))
        self._writable.poll()
        for other in self.other_descriptors:
            os.dup2(self._descriptor, other, os.get_inheritable(other))
