"""Let ranks of one machine find each other in a private folder with a socket. Imported before torch.

Every follower keeps two connections to rank 0: one for commands, and a life line that stays silent unless something is
wrong. A process that ends in whatever way closes its lines, and that is how the others know at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.processes import places

SOCKET = "control.sock"
"""Name of the socket in the ranks' folder."""
_HEADER = struct.Struct("<I")  # length of the message that follows, in bytes

MEETING_TIMEOUT_S = 120.0
"""Seconds for all followers to start and connect. Doubling it doubles the wait for one that never comes."""
GRACE_S = 1.0
"""Seconds in which the cause of a failure shows itself: a process that has ended, or was told to. Doubling it doubles
what an answer waits for the reason why it failed."""


def make_meeting_place(folder: Path) -> Path:
    """Create the ranks' folder for this user alone. Raises ConfigError when it is another's or its name is too long."""
    if len(os.fsencode(folder / SOCKET)) > places.MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"the ranks' folder is {str(folder)!r}, too long for a socket; give a shorter one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return places.make_private(folder)


class Line:
    """One connection that carries messages of bytes, each preceded by its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout for every part of a message, sent or received."""
        self._connection.settimeout(timeout_s)

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError when nobody reads any more; a part may have left, so the line is useless."""
        self._connection.sendall(_HEADER.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Return the next message, or None when the other has closed the line. Raises TimeoutError."""
        header = self._exactly(_HEADER.size)
        return None if header is None else self._exactly(_HEADER.unpack(header)[0])

    def _exactly(self, count: int) -> bytes | None:
        data, view_at = bytearray(count), 0
        view = memoryview(data)
        while view_at < count:
            try:
                got = self._connection.recv_into(view[view_at:])
            except ConnectionError:
                return None
            if not got:
                return None
            view_at += got
        return bytes(data)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that reads
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Guest:
    """A follower as rank 0 sees it."""

    rank: int
    commands: Line
    life: Line

    def await_ready(self) -> bool:
        """Wait until the follower is about to join; return False when it has ended instead. Raises TimeoutError."""
        return self.commands.receive() is not None

    def close(self) -> None:
        self.commands.close()
        self.life.close()


def receive_guests(folder: Path, num_ranks: int, timeout_s: float) -> list[Guest]:
    """Listen, on rank 0, until every follower has come; return them by rank, with timeout_s set on their command lines.

    Raises Unavailable naming the ranks that did not come within timeout_s.
    """
    path, found = folder / SOCKET, dict[tuple[int, str], Line]()
    path.unlink(missing_ok=True)
    give_up = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(2 * num_ranks)
        while len(found) < 2 * (num_ranks - 1):
            try:
                listener.settimeout(max(0.01, give_up - time.monotonic()))
                connection, _ = listener.accept()
                connection.settimeout(max(0.01, give_up - time.monotonic()))
                hello = Line(connection).receive()
            except TimeoutError:
                _close_all(found)
                missing = sorted({*range(1, num_ranks)} - {rank for rank, _ in found})
                raise Unavailable(f"ranks {missing} of {num_ranks} did not come within {timeout_s:g} s") from None
            if hello is None:  # the follower ended before it spoke; its successor connects again
                connection.close()
                continue
            said = json.loads(hello)
            key = (int(said["rank"]), str(said["line"]))
            connection.settimeout(timeout_s if key[1] == "commands" else None)
            if key in found:  # the follower that had this line ended and was started again
                found[key].close()
            found[key] = Line(connection)
    path.unlink(missing_ok=True)
    return [Guest(rank, found[rank, "commands"], found[rank, "life"]) for rank in range(1, num_ranks)]


def _close_all(lines: dict[tuple[int, str], Line]) -> None:
    for line in lines.values():
        line.close()


@dataclass(frozen=True, slots=True)
class Host:
    """Rank 0 as a follower sees it."""

    commands: Line
    life: Line

    def say_ready(self) -> None:
        """Say that this follower is about to join rank 0's process group. Raises OSError."""
        self.commands.send(b"ready")

    def report(self, message: str) -> None:
        """Say why this follower is about to end."""
        with contextlib.suppress(OSError):
            self.life.send(message.encode())


def join_host(folder: Path, rank: int, timeout_s: float) -> Host:
    """Wait, on a follower, for rank 0 and greet it. Raises Unavailable when it does not listen within timeout_s."""
    commands = _connect(folder, rank, "commands", timeout_s)
    return Host(commands, _connect(folder, rank, "life", timeout_s))


def _connect(folder: Path, rank: int, line: str, timeout_s: float) -> Line:
    give_up = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(folder / SOCKET))
            found = Line(connection)
            found.send(_json({"rank": rank, "line": line}))
            return found
        except OSError as error:
            connection.close()
            if time.monotonic() > give_up:
                raise Unavailable(f"rank 0 does not listen in {str(folder)!r}: {error.strerror}") from None
            time.sleep(0.1)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
