"""Drain the workers of a container that is about to end, before Ray's node ends, and the workers with it.

Each worker listens on a socket in the folder that the image names in OUTRIDER_NODE_FOLDER; no other user can reach it.
`python -m deploy.node_drain` drains all workers and returns when they have drained: Kubernetes runs it before a pod
ends. Under Compose deploy/docker/stay.py does the same. Neither Ray nor the launcher takes part; gateways see in the
workers' own replies that they drain.
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
"""Environment variable with the path of the folder of the workers' sockets."""
_HELLO_S = 3.0
"""Seconds in which a worker must send its limit, after which it counts as hanging. A worker may also exceed its limit
by as many seconds."""


def listen(folder: Path, drain: Callable[[], None], limit_s: float) -> None:
    """Open a socket through which `drain_workers` makes this process drain. Each request calls `drain` on a thread of
    its own.

    folder: folder of the workers' sockets, in which this process creates its own. limit_s: maximum seconds that `drain`
    takes; `drain_workers` waits no longer. Raises OSError if the folder cannot be used.
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
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, drain, limit_s), daemon=True).start()


def _answer(connection: socket.socket, drain: Callable[[], None], limit_s: float) -> None:
    """Send the limit at once, and close the connection when `drain` has returned."""
    with connection:
        with contextlib.suppress(OSError):  # the other end may be gone
            connection.sendall(f"{limit_s}\n".encode())
        drain()


def drain_workers(folder: Path) -> int:
    """Drain all workers of this container at the same time. Return how many there were, once each has drained, ended,
    or exceeded its time limit.

    folder: folder of the workers' sockets.
    """
    draining = list[tuple[socket.socket, float]]()
    for path in sorted(folder.glob("*.sock")):
        connected = _connect(path)
        if connected is not None:
            draining.append(connected)
    for connection, give_up_s in draining:
        with connection:
            connection.settimeout(max(0.01, give_up_s - time.monotonic()))
            with contextlib.suppress(OSError):  # beyond its limit, or its process was killed
                connection.recv(1)
    return len(draining)


def _connect(path: Path) -> tuple[socket.socket, float] | None:
    """Start a worker's drain. Return the connection, and the monotonic time until which the drain may last.

    Returns None if the worker's process is gone or hangs.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_HELLO_S)
    try:
        connection.connect(str(path))
        with connection.makefile("r") as reply:
            limit_s = float(reply.readline())
    except (OSError, ValueError):
        connection.close()
        return None
    return connection, time.monotonic() + limit_s + _HELLO_S


def main() -> int:
    """Drain the workers of this container. Return the exit code, 0."""
    started_s = time.monotonic()
    num_workers = drain_workers(Path(os.environ[FOLDER]))
    sys.stderr.write(f"node: {num_workers} worker(s) drained within {time.monotonic() - started_s:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
