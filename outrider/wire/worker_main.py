"""`main` of a worker process: read settings, start, say so in a line on stdout; drain and stop on SIGTERM or SIGINT."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from outrider.wire.config import DraftConfig, TargetConfig, load
from outrider.wire.errors import OutriderError
from outrider.wire.log import configure_logging, tell_end


class Handle(Protocol):
    """What `start_worker` returns."""

    @property
    def address(self) -> str: ...

    @property
    def running(self) -> bool: ...

    def info(self) -> Any: ...

    def wait_failed(self, timeout_s: float | None = None) -> None: ...

    def drain(self, timeout_s: float, cut_short: Callable[[], bool] = ...) -> None: ...

    def stop(self, grace_s: float = 2.0) -> None: ...


class _Stopped(BaseException):
    """A signal came before the worker had started."""


def announce(**fields: object) -> None:
    """One JSON line on stdout, for whoever started this process."""
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()


def run_worker(name: str, config_type: type[Any], start_worker: Callable[[Any], Handle], argv: list[str]) -> int:
    """Returns the exit code: 0 after a signal, 1 when it could not start or the engine ended by itself."""
    stopping: list[int] = []

    def stop_start(number: int, _frame: object) -> None:
        raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_start)  # as the first process of a container it has no default
    try:
        config: DraftConfig | TargetConfig = load(config_type, argv)
        configure_logging(config.log_level, name, config.log_format)
        handle = start_worker(config)
    except OutriderError as error:
        tell_end(name, error.message)
        return 1
    except _Stopped:
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: stopping.append(got))
    info = handle.info()
    announce(address=handle.address, metrics_address=info.metrics_address or None, pid=info.pid, epoch=info.epoch)
    try:
        while not stopping and handle.running:
            handle.wait_failed(0.1)
        if stopping:
            handle.drain(config.drain_timeout_s, lambda: len(stopping) > 1)  # a second signal ends it at once
        handle.wait_failed(0.0)
    except Exception as error:
        tell_end(name, f"the engine ended: {error}")
        return 1
    finally:
        handle.stop()
    return 0


def leave(code: int) -> NoReturn:
    """End the process as it is: taking torch apart first takes a second, and there is nothing left to save."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
