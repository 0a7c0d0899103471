"""Signals as a flag that waiting code looks at: the order of stopping is then ours, whatever was going on."""

from __future__ import annotations

import signal
import threading
import types


class StopRequested(Exception):
    """The user, or the system, asked for the end. Raised where something was being waited for."""


class StopFlag:
    """Set by SIGINT, SIGTERM and SIGHUP once `install` was called, or by `set`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.hurry = False
        """A second signal came: stop without grace."""

    def install(self) -> None:
        """From the main thread. Call again after a library has put its own handlers in."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """True when it is set; returns as soon as it is."""
        return self._event.wait(timeout_s)

    def check(self) -> None:
        """Raise StopRequested when it is set."""
        if self._event.is_set():
            raise StopRequested

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.hurry = self._event.is_set()
        self._event.set()
