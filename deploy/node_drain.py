"""Drains the workers of a container that is about to end, before Ray's node ends, and they with it.

Each worker listens on a socket in the folder that the image names, OUTRIDER_NODE_FOLDER: nobody else reaches it.
`python -m deploy.node_drain` asks them all and returns when they have drained: before a pod ends. In compose
deploy/docker/stay.py does the same. Ray and the launcher need not know; gateways hear it from the workers themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = "OUTRIDER_NODE_FOLDER"
_HELLO_S = 3.0
"""Seconds for a worker to say how long it may take, and beyond that time to end. One that says nothing hangs. Twice as
long, and a container with a worker that hangs ends so much later."""


def listen(folder: Path, drain: Callable[[], None], limit_s: float) -> None:
    """Run `drain`, which takes at most `limit_s`, on a thread of its own when the container is about to end.

    Raises OSError when the folder cannot be used.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}.sock"
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    threading.Thread(target=_accept, args=(server, drain, limit_s), name="node-drain", daemon=True).start()


def _accept(server: socket.socket, drain: Callable[[], None], limit_s: float) -> None:
    while True:
        asking, _ = server.accept()
        threading.Thread(target=_answer, args=(asking, drain, limit_s), daemon=True).start()


def _answer(asking: socket.socket, drain: Callable[[], None], limit_s: float) -> None:
    """Who asks hears the limit at once, and the end of the connection once `drain` is through."""
    with asking:
        with contextlib.suppress(OSError):  # it does not wait for the answer
            asking.sendall(f"{limit_s}\n".encode())
        drain()


def drain_workers(folder: Path) -> int:
    """Return how many workers there were, once each has drained, ended, or taken longer than it said."""
    asked = [found for path in sorted(folder.glob("*.sock")) if (found := _ask(path)) is not None]
    for connection, give_up_s in asked:
        with connection:
            connection.settimeout(max(0.01, give_up_s - time.monotonic()))
            with contextlib.suppress(OSError):  # too long, or its process was killed
                connection.recv(1)
    return len(asked)


def _ask(path: Path) -> tuple[socket.socket, float] | None:
    """The connection, and until when to wait for its end; None where the process is gone or hangs."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_HELLO_S)
    try:
        connection.connect(str(path))
        with connection.makefile("r") as said:
            limit_s = float(said.readline())
    except (OSError, ValueError):
        connection.close()
        return None
    return connection, time.monotonic() + limit_s + _HELLO_S


def main() -> int:
    began_s = time.monotonic()
    num_workers = drain_workers(Path(os.environ[FOLDER]))
    sys.stderr.write(f"node: {num_workers} worker(s) drained within {time.monotonic() - began_s:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
