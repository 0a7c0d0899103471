"""A command under a pseudo-terminal: what a person sees, without the colours and the moves of the cursor."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping

from tests.forked import REPO, clean_environment

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_OUTRIDER = ("-c", "from outrider.cli.main import main; main()")


class OnTerminal:
    """`outrider ARGS` on a terminal of its own, whose text is kept as it comes. Use as `with`."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None, columns: int = 100) -> None:
        self._own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {**clean_environment(), "TERM": "xterm", **(env or {})}
        command = [sys.executable, *_OUTRIDER, *args]
        self.process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, cwd=REPO, env=environment, start_new_session=True
        )
        os.close(its)
        self._text = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(5)
        os.close(self._own)

    def _read(self) -> None:
        try:
            while data := os.read(self._own, 2**16):
                self._text += data
        except OSError:  # nobody has the other end any more
            return

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._text.decode(errors="replace")).replace("\r\n", "\n")

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code
