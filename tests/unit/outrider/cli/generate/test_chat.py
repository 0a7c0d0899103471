"""`outrider chat`."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress

from tests.unit.outrider.cli.generate.typed import outrider
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, hanging

RUN = [sys.executable, "-c", "from outrider.cli.main import main; main()"]
# Ctrl-C typed on a terminal becomes SIGINT only for the session that has taken it.
RUN_ON_TERMINAL = [*RUN[:2], f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {RUN[2]}"]


def test_chat_keeps_and_forgets_history(gateway: ScriptedGateway) -> None:
    script = "one\ntwo\n\n/reset\nthree\n/quit\nnever\n"
    result = outrider("chat", "--address", gateway.address, "--system", "be brief", stdin=script)
    assert result.exit_code == 0
    assert result.stdout == TEXT * 3
    system, one, answer = ("system", "be brief"), ("user", "one"), ("assistant", TEXT)
    assert [_messages(request) for request in gateway.requests] == [
        [system, one],
        [system, one, answer, ("user", "two")],
        [system, ("user", "three")],
    ]


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    with Terminal(["chat", "--address", gateway.address]) as terminal:
        terminal.expect("> ")
        terminal.send("one\n")
        terminal.expect("red")
        terminal.send("\x03")
        terminal.expect("> ")
        assert gateway.cancelled.wait(5)
        terminal.interrupt_prompt()
        terminal.send("two\n")
        terminal.expect("ran")
        terminal.expect("> ")
        terminal.send("\x04")
        assert terminal.wait() == 0
    assert _messages(gateway.requests[1]) == [("user", "one"), ("assistant", " the quick red"), ("user", "two")]


def _messages(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, args: list[str]) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm"}
        self._process = subprocess.Popen(
            [*RUN_ON_TERMINAL, *args], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str, timeout_s: float = 20) -> None:
        """Reads on until `text` has come since the last expectation."""
        end = time.monotonic() + timeout_s
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} within {timeout_s} s in {self._seen!r}"
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def interrupt_prompt(self) -> None:
        """Ctrl-C at a prompt gives up the line only. Python forgets one that comes while the prompt is being set up."""
        for _ in range(20):
            self.send("\x03")
            with suppress(AssertionError):
                return self.expect("> ", timeout_s=1)
        raise AssertionError("no new prompt after Ctrl-C")

    def wait(self) -> int:
        return self._process.wait(20)
