"""Connect the ranks of one machine through a socket in a private folder. Imported before torch.

Every other rank has two connections to rank 0: one for commands, and a life line that carries nothing but the reason
for which the rank ends. However a process ends, its connections close, and the other side notices it at once.
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

from outrider.wire.errors import ConfigError, Unavailable
from outrider.wire.processes import folders

SOCKET = "control.sock"
"""File name of the Unix socket on which rank 0 listens for the other ranks, in the ranks' folder."""
_HEADER = struct.Struct("<I")  # bytes of the message that follows

MEETING_TIMEOUT_S = 120.0
"""Maximum time in seconds in which the processes of all other ranks must start and connect to rank 0."""
GRACE_S = 1.0
"""Seconds that a rank waits after another one's failure. When joint work fails, rank 0 waits this long for news that
another rank's process has ended, which explains it. When rank 0's process has ended, another rank waits this long for
its own orderly end, then ends by force."""


def make_meeting_place(folder: Path) -> Path:
    """Create the folder of the ranks' socket, accessible to this user alone. Return its path.

    Raises ConfigError if the folder belongs to another user, or if its name is too long for a socket.
    """
    if len(os.fsencode(folder / SOCKET)) > folders.MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"the ranks' folder is {str(folder)!r}, too long for a socket; give a shorter one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folders.make_private(folder)


class MessageConnection:
    """Connection that carries messages of bytes, each preceded by its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit in seconds of each `send`, and of each wait for data within `receive`."""
        self._connection.settimeout(timeout_s)

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError if it cannot be sent. A part of it may then have been sent, so the connection
        must not be used again.
        """
        self._connection.sendall(_HEADER.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Return the next message; None if the other end has closed the connection. Raises TimeoutError if it takes
        longer than `set_timeout` allows.
        """
        header = self._receive_exactly(_HEADER.size)
        if header is None:
            return None
        return self._receive_exactly(_HEADER.unpack(header)[0])

    def _receive_exactly(self, count: int) -> bytes | None:
        data = bytearray(count)
        view = memoryview(data)
        num_received = 0
        while num_received < count:
            try:
                num_bytes = self._connection.recv_into(view[num_received:])
            except ConnectionError:
                return None
            if not num_bytes:
                return None
            num_received += num_bytes
        return bytes(data)

    def fileno(self) -> int:
        """Return the file descriptor of the connection, for a selector."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end of the connection; a thread that waits in `receive` returns."""
        with contextlib.suppress(OSError):  # wakes a thread that reads
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass(frozen=True, slots=True)
class RankLines:
    """Rank 0's two connections to the process of another rank: for commands, and to notice that process's end."""

    rank: int
    """Number of the other rank, from 1."""
    commands: MessageConnection
    """Connection on which rank 0 sends its commands to the other rank."""
    life: MessageConnection
    """Connection that closes when the other rank's process ends. Before that, the process sends the reason on it, if it
    can."""

    def await_ready(self) -> bool:
        """Wait until the other rank sends that it is about to join the process group. Return True then, and False if
        its process has ended instead.

        Raises TimeoutError.
        """
        return self.commands.receive() is not None

    def close(self) -> None:
        """Close both connections to the other rank."""
        self.commands.close()
        self.life.close()


def accept_ranks(folder: Path, num_ranks: int, timeout_s: float) -> list[RankLines]:
    """Listen, on rank 0, until the processes of all other ranks have connected. Return the connections in the order of
    the ranks.

    folder: where rank 0 creates the Unix socket. num_ranks: number of all ranks, rank 0 included. timeout_s: maximum
    time in seconds until all have connected, and later for each wait for data on their command connections. Raises
    Unavailable with the ranks that did not connect.
    """
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    lines: dict[tuple[int, str], MessageConnection] = {}  # by rank, and "commands" or "life"
    give_up_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(2 * num_ranks)
        while len(lines) < 2 * (num_ranks - 1):
            try:
                listener.settimeout(max(0.01, give_up_s - time.monotonic()))
                connection, _ = listener.accept()
                connection.settimeout(max(0.01, give_up_s - time.monotonic()))
                message = MessageConnection(connection).receive()
            except TimeoutError:
                _close_all(lines)
                missing = sorted({*range(1, num_ranks)} - {rank for rank, _ in lines})
                raise Unavailable(f"ranks {missing} of {num_ranks} did not come within {timeout_s:g} s") from None
            if message is None:  # the rank ended before it sent anything; its successor connects again
                connection.close()
                continue
            hello = json.loads(message)
            key = (int(hello["rank"]), str(hello["line"]))
            line_timeout_s = None
            if key[1] == "commands":
                line_timeout_s = timeout_s
            connection.settimeout(line_timeout_s)
            if key in lines:  # the rank that had this line ended and was started again
                lines[key].close()
            lines[key] = MessageConnection(connection)
    path.unlink(missing_ok=True)
    return [RankLines(rank, lines[rank, "commands"], lines[rank, "life"]) for rank in range(1, num_ranks)]


def _close_all(lines: dict[tuple[int, str], MessageConnection]) -> None:
    for line in lines.values():
        line.close()


@dataclass(frozen=True, slots=True)
class RankZeroLines:
    """The two connections of a rank above 0 to rank 0: for commands, and to notice the end of the other's process."""

    commands: MessageConnection
    """Connection on which this rank, above 0, receives rank 0's commands."""
    life: MessageConnection
    """Connection that closes when either process ends. Before the process of the rank above 0 ends, it sends the reason
    on it, if it can."""

    def send_ready(self) -> None:
        """Tell rank 0 that this rank is about to join the process group. Raises OSError."""
        self.commands.send(b"ready")

    def report(self, message: str) -> None:
        """Tell rank 0 why this process is about to end. Does nothing if the connection is closed."""
        with contextlib.suppress(OSError):
            self.life.send(message.encode())


def connect_to_rank_zero(folder: Path, rank: int, timeout_s: float) -> RankZeroLines:
    """Connect the process of a rank above 0 to rank 0. Return the connection for commands and the one that shows life.

    folder: folder of the ranks' socket. timeout_s: seconds to wait for rank 0. Raises Unavailable if rank 0 does not
    listen in the folder by then.
    """
    commands = _connect(folder, rank, "commands", timeout_s)
    return RankZeroLines(commands, _connect(folder, rank, "life", timeout_s))


def _connect(folder: Path, rank: int, name: str, timeout_s: float) -> MessageConnection:
    give_up_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(folder / SOCKET))
            line = MessageConnection(connection)
            line.send(json.dumps({"rank": rank, "line": name}).encode())
            return line
        except OSError as error:
            connection.close()
            if time.monotonic() > give_up_s:
                raise Unavailable(f"rank 0 does not listen in {str(folder)!r}: {error.strerror}") from None
            time.sleep(0.1)
