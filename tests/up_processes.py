"""Start `outrider up` as users do, as a process of its own, for what is measured of a whole system from outside."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from outrider.wire.processes.descendants import descendants

_READY = "Ctrl-C stops everything"
"""In the last line of a start."""


class Up:
    """One `outrider up` on free ports, with the demo pair."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "outrider", "up", "--port", "0", "--grpc-port", "0", *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self.ready = threading.Event()
        """Set when it serves, or has ended."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def pids(self) -> list[int]:
        """Return the process and all below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    def stop(self, number: signal.Signals, timeout_s: float) -> int | None:
        """Send a signal and return the exit code, or None when it has not ended after `timeout_s`."""
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if _READY in line:
                self.ready.set()
        self.ready.set()


@contextlib.contextmanager
def serving(*args: str, timeout_s: float = 300.0) -> Iterator[Up]:
    """Yield an `outrider up` that serves, and end it with the block."""
    up = Up(*args)
    try:
        if not up.ready.wait(timeout_s) or up.process.poll() is not None:
            raise RuntimeError("\n".join(["outrider up does not serve:", *up.lines[-20:]]))
        yield up
    finally:
        if up.stop(signal.SIGTERM, timeout_s) is None:
            up.process.kill()
