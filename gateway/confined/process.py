"""A process that does one piece of work at a time within limits: `python -m gateway.confined.process`.

`pool.py` starts it with the name of a module. The module has `prepare()`, called once, and `work(request)`, called for
each request. Requests and replies are JSON values. They travel in frames on stdin and stdout: four bytes with the
length, big-endian, then the JSON. When the process has read a request, it sends the frame `{"begun": true}`, then
works, then replies. Once it is ready, output that libraries print is dropped, because it may quote a request.

The limits also stop compiled code. The kernel counts CPU time and sends SIGPROF, whose default action ends the process.
Memory beyond the limit raises MemoryError in Python and aborts compiled code.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from outrider.wire.errors import InvalidRequest
from outrider.wire.processes.processes import release_freed_memory
from outrider.wire.telemetry.log import describe

LENGTH = struct.Struct(">I")
"""Format of the length that begins a frame: the size of the frame's JSON, in bytes."""
NICENESS = 10
"""Number added to the process's niceness, so that the gateway's event loop is scheduled first."""
MAX_STACK_BYTES = 4 << 20
"""Limit of the process's stack, in bytes: a quarter of the workers' 16 MiB, so that what compiles here does there."""
MAX_KEPT_BYTES = 32 << 20
"""Limit of the address space that libraries may keep after a piece of work, in bytes. A process that keeps more is
replaced. Compiling the largest of 300 public schemas takes 60 MB."""


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame (a length, then JSON) and return its JSON as bytes; None if the pool has closed the pipe."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Write a JSON value as a frame: the length of its JSON, then the JSON."""
    data = json.dumps(value).encode("ascii")
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def address_space_bytes() -> int:
    """Return the size of this process's address space, which RLIMIT_AS limits, in bytes; 0 without /proc."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return num_pages * resource.getpagesize()


def do_work(module: Any, frame: bytes, cpu_s: float) -> dict[str, Any]:
    """Call the module's `work` for a request, and return the reply frame's content.

    frame: JSON of the request. SIGPROF ends the process if the work takes more than `cpu_s` seconds of CPU time.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return {"result": module.work(json.loads(frame))}
    except InvalidRequest as error:
        return {"refused": error.message, "param": error.param}
    except MemoryError:
        return {"out_of_memory": True}
    except BaseException as error:  # a panic of compiled code is no Exception
        return {"failed": describe(error)}  # without the error's message, which may quote the request
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main(module_name: str, cpu_s: float, memory_bytes: int) -> None:
    """Answer requests from stdin until it is closed.

    module_name: name of the module whose function `work` computes the replies. cpu_s: limit of the CPU time of one
    request, in seconds. memory_bytes: limit of the address space that one request may add, in bytes.
    """
    requests = os.fdopen(0, "rb")
    replies = os.fdopen(1, "wb")
    sys.stdout = sys.stderr  # so that nothing that a library prints is taken for a reply
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # terminals and `systemctl kill` send them to all; the pool ends this one
    os.nice(NICENESS)
    module = importlib.import_module(module_name)
    module.prepare()
    base_bytes = address_space_bytes()
    if base_bytes:
        limit = base_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    write_frame(replies, {"ready": True})
    while (frame := read_frame(requests)) is not None:
        write_frame(replies, {"begun": True})
        began_s = time.process_time()
        reply = do_work(module, frame, cpu_s)
        reply["cpu_s"] = time.process_time() - began_s
        if address_space_bytes() > base_bytes:
            release_freed_memory()
        # Memory that libraries keep would count against the next request: the pool starts another process instead.
        reply["is_last"] = address_space_bytes() > base_bytes + MAX_KEPT_BYTES
        write_frame(replies, reply)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
