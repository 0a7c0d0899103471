"""`StopFlag`, a flag that signals set and that code can wait for. With it a process stops its parts in the order that
it chooses.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import types
from collections.abc import Iterator

_STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def stop_signals() -> list[signal.Signals]:
    """Return the signals that should stop this process: SIGINT, SIGTERM and SIGHUP. SIGHUP is left out if the process
    ignores it, as it does under nohup.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGINT, signal.SIGTERM]
    return [*_STOPPING]


def ignore_log_rotation() -> None:
    """Ignore SIGUSR1 in this process. Tools that rotate logs send this signal so that a process opens its log file
    again. Our processes log to stderr and have no log file, and without a handler the signal would end them. Call it in
    the main thread.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopRequested(Exception):
    """Raised to end the current work after the stop flag was set, usually by a signal."""


class StopFlag:
    """A flag that is set by `set` and, after `install`, by the signals SIGINT, SIGTERM and SIGHUP.

    A signal handler runs between any two instructions of the main thread, which may hold any lock at that point.
    Therefore the handler takes no lock, and wakes waiting threads through a pipe. The interpreter writes to that pipe
    too when a signal arrives, so that a signal just before a wait also ends the wait.
    """

    def __init__(self) -> None:
        self.is_hurried = False
        """Whether a signal arrived after the flag was set. Then stop at once, without waiting for open requests."""
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
        """Install handlers that set the flag at the signals of `stop_signals`. Call it in the main thread, and again
        after a library has installed handlers of its own.
        """
        self._is_installed = True
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager: install the signal handlers, and restore the previous ones after the block. Use it in the
        main thread.
        """
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
        """Set the flag. Any thread may call it."""
        self._is_set = True
        self.notify()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def notify(self) -> None:
        """End the current call of `wait` without setting the flag. If no thread is waiting, the next call of `wait`
        returns at once. Any thread may call it.
        """
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the wait ends in any case
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, `notify` is called or any signal arrives, at most `timeout_s` seconds (None = no
        limit). Return whether the flag is set.

        If several threads wait, one call of `notify` ends the wait of only one of them, while setting the flag ends all
        waits.
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
        self.is_hurried = self.is_hurried or self._is_set
        self._is_set = True
        self.notify()
