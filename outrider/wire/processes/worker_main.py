"""`run_worker`, the main function of a worker process. It reads settings, starts the worker, and announces it on stdout
to the process that started it. On a signal it drains and stops the worker. Called by draft_service and target_service.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import OutriderError
from outrider.wire.processes.stop_flag import StopFlag, ignore_log_rotation
from outrider.wire.settings.config import WorkerConfig, load
from outrider.wire.telemetry.log import configure_logging, log_end


class RunningWorker(Protocol):
    """Interface of a running worker. The function that is passed to `run_worker` as `start_worker` returns an object
    with this interface.
    """

    @property
    def address(self) -> str:
        """host:port of the worker's gRPC server."""

    @property
    def running(self) -> bool:
        """Whether the worker's engine thread runs."""

    def info(self) -> Any:
        """Return the worker's description, a WorkerInfo message."""

    def wait_failed(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has ended, at most `timeout_s` seconds (None = no limit). If an error ended it, raise
        that error.
        """

    def drain(self, timeout_s: float, cut_short: Callable[[], bool] = ...) -> None:
        """Refuse new slots, and wait until all open ones are closed. Return earlier after `timeout_s` seconds, or once
        `cut_short()` returns True.
        """

    def stop(self, grace_s: float = 2.0) -> None:
        """End the worker's gRPC server and its engine. grace_s: seconds for which open calls may continue."""


def announce(**fields: object) -> None:
    """Write an event "ready" with these fields to stdout, by which the parent process learns that this process has
    started.
    """
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()


def memory_taken(info: pb.WorkerInfo) -> str:
    """Return a text on the memory of this worker process: its resident size now, and the size that its KV cache has
    when it is full.

    info: the worker's WorkerInfo.
    """
    num_tokens = info.num_kv_blocks * info.kv_block_size
    cache = f"KV cache {num_tokens:,} tokens, {_mib(num_tokens * info.kv_bytes_per_token)} when full"
    if info.is_text_only:
        cache = f"text only, {cache}"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return cache
    resident = f"{_mib(pages * os.sysconf('SC_PAGE_SIZE'))} resident"
    if not num_tokens:
        return resident
    return f"{cache}, {resident} now"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def run_worker(name: str, config_type: type[Any], start_worker: Callable[[Any], RunningWorker], argv: list[str]) -> int:
    """Run a worker until a signal or an error ends it. Return the exit code: 0 after a signal, 1 if it could not start
    or its engine ended.

    name: name of the worker in logs. config_type: class of its settings. start_worker: starts the worker from its
    settings. argv: the command line without the program. A signal before the worker has started ends the process at
    once.
    """
    ignore_log_rotation()
    stop = StopFlag()
    stop.install()  # at once: the first process of a container has no default handlers
    ended = threading.Event()
    started = threading.Event()
    watcher = threading.Thread(target=_leave_before_start, args=(stop, started), name="start-stop", daemon=True)
    watcher.start()
    try:
        config: WorkerConfig = load(config_type, argv)
        configure_logging(config.log_level, name, config.log_format)
        handle = start_worker(config)
    except OutriderError as error:
        log_end(name, error.message)
        return 1
    started.set()
    stop.notify()
    watcher.join()  # before another thread waits for the flag, and before the worker is announced
    threading.Thread(target=_await_engine, args=(handle, ended, stop.notify), name="engine-end", daemon=True).start()
    info = handle.info()
    announce(
        address=handle.address,
        metrics_address=info.metrics_address or None,
        pid=info.pid,
        epoch=info.epoch,
        memory=memory_taken(info),
    )
    try:
        while not ended.is_set() and not stop.wait():
            pass
        if stop.is_set():
            handle.drain(config.drain_timeout_s, lambda: stop.is_hurried)  # a second signal ends it at once
        handle.wait_failed(0.0)
    except Exception as error:
        log_end(name, f"the engine ended: {error}")
        return 1
    finally:
        handle.stop()
    return 0


def _leave_before_start(stop: StopFlag, started: threading.Event) -> None:
    # A load takes minutes, and no gateway uses this worker yet: there is nothing to drain. An exception of a signal
    # handler would be lost in a `__del__` or a callback of C code. Ranks end with this process.
    while not stop.wait():
        if started.is_set():
            return
    if not started.is_set():
        leave(0)


def _await_engine(handle: RunningWorker, ended: threading.Event, notify: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # the main thread raises it again
        handle.wait_failed()
    ended.set()
    notify()


def leave(code: int) -> NoReturn:
    """End this process at once with exit code `code`. Python's own exit takes a second longer, to unload torch."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
