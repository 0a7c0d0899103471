"""Work for the processes of test_confined_pool: what a request asks for, good and bad."""

import os
import time
from typing import Any

from outrider.wire.errors import InvalidRequest


def prepare() -> None:
    pass


def work(request: dict[str, Any]) -> Any:
    kind = request["kind"]
    if kind == "echo":
        return request["value"]
    if kind == "pid":
        time.sleep(request.get("sleep_s", 0.0))
        return os.getpid()
    if kind == "loop":
        while True:
            pass
    if kind == "memory":
        return len("x" * request["bytes"])
    if kind == "keep":
        _kept.append(bytearray(request["bytes"]))
        return os.getpid()
    if kind == "refuse":
        raise InvalidRequest("x is 1, must be 2", param="x")
    if kind == "abort":
        os.abort()
    raise SystemExit("a panic")


_kept: list[bytearray] = []
