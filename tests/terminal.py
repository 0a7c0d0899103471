"""A command under a pseudo-terminal, and what a person would see on its screen."""

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping

import pyte

START = "import os, sys; os.login_tty(0); os.execvp(sys.argv[1], sys.argv[1:])"
"""Makes the terminal the command's own, as a shell has it, so that Ctrl-C reaches it."""


class Terminal:
    """A running command. Its output is read, and the screen drawn, whenever somebody looks."""

    def __init__(self, args: list[str], env: Mapping[str, str], columns: int, rows: int, cwd: str | None) -> None:
        self._ours, self._its = os.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._modes = termios.tcgetattr(self._its)
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.output = b""
        """All that was ever written."""
        command = [sys.executable, "-SEc", START, *args]
        self._process = subprocess.Popen(command, stdin=self._its, stdout=self._its, stderr=self._its, env=env, cwd=cwd)

    def text(self) -> str:
        """The screen as it is now."""
        while select.select([self._ours], [], [], 0)[0]:
            read = os.read(self._ours, 65536)
            self.output += read
            self._stream.feed(read)
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, *texts: str | re.Pattern[str], without: str | None = None, timeout_s: float = 30.0) -> str:
        """The screen once it shows all of these and not `without`."""
        wanted = [re.compile(re.escape(each)) if isinstance(each, str) else each for each in texts]
        give_up = time.monotonic() + timeout_s
        while True:
            shown = self.text()
            if all(each.search(shown) for each in wanted) and (without is None or without not in shown):
                return shown
            assert time.monotonic() < give_up and self._process.poll() is None, shown
            time.sleep(0.02)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code."""
        give_up = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < give_up:
            self.text()  # else what it writes at its end has no room
            time.sleep(0.01)
        self.text()
        return self._process.wait(0)

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal's modes are those that the command found."""
        return termios.tcgetattr(self._its) == self._modes

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        os.close(self._ours)
        os.close(self._its)


@contextlib.contextmanager
def terminal(
    *args: str, env: Mapping[str, str], columns: int = 80, rows: int = 24, cwd: str | None = None
) -> Iterator[Terminal]:
    """Run a command under a terminal of its own, and end it, whatever happens."""
    started = Terminal(list(args), {**env, "TERM": "xterm-256color"}, columns, rows, cwd)
    try:
        yield started
    finally:
        started.close()
