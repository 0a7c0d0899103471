"""`python -m tests.hostile.gateway ARGS`: the gateway with clocks around what its event loop and its threads run.

The product has no hook for this: the loop here is a subclass of uvloop's, through whose methods every step of a task,
callback, timer and reader passes, and a job of a thread pool is timed where the pool runs it. All times are CPU time of
the one thread, so that other processes of a busy machine do not count. Whatever takes long is a line of JSON in the
file that HOSTILE_LOG names.
"""

import concurrent.futures.thread
import functools
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVarTuple

import uvloop

Ts = TypeVarTuple("Ts")

LOG = "HOSTILE_LOG"
MIN_CALLBACK_S = 0.01
MIN_JOB_S = 0.2
STACK_AFTER_S = {"callback": 0.05, "job": 1.0}
"""CPU seconds after which the stack of what still runs is written."""
LOOK_EVERY_S = 0.02
MAX_DATA_BYTES = 8 << 30
"""Memory that the gateway may ask for: a request without bounds fails here, and the machine goes on."""


@dataclass(frozen=True)
class LongRun:
    """One callback of the loop, or one job of a thread, that took long."""

    kind: str
    """callback, or job."""
    name: str
    cpu_s: float
    """CPU time of its thread, in seconds; of what still runs, so far."""
    at_s: float
    """Monotonic time of its end, or of the look at it."""
    stack: str = ""
    """The last frames of what still runs; empty for what has ended."""


@dataclass
class _Running:
    kind: str
    named: Any
    """The function whose name it bears."""
    since_s: float
    """CPU time of its thread when it began."""
    is_written: bool = False


class Clock:
    """Times callbacks and jobs, each on the thread that runs it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        """By identity of the thread."""
        threading.Thread(target=self._look, name="hostile-look", daemon=True).start()

    def run(self, kind: str, min_s: float, function: Callable[..., Any], *args: Any, named: Any = None) -> Any:
        """Call the function and write a line when it took min_s of CPU time or more. named: whose name the line has."""
        thread = threading.get_ident()
        outer = self._running.get(thread)
        began_s = time.thread_time()
        self._running[thread] = _Running(kind, named or function, began_s)
        try:
            return function(*args)
        finally:
            taken_s = time.thread_time() - began_s
            if outer is None:
                self._running.pop(thread, None)
            else:
                self._running[thread] = outer
            if taken_s >= min_s:
                self._write(LongRun(kind, name_of(named or function), taken_s, time.monotonic()))

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            for thread, running in list(self._running.items()):
                try:
                    cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread)) - running.since_s
                except OSError:  # the thread has ended
                    continue
                if running.is_written or cpu_s < STACK_AFTER_S[running.kind]:
                    continue
                frame = sys._current_frames().get(thread)
                if frame is None or self._running.get(thread) is not running:
                    continue
                running.is_written = True
                frames = traceback.extract_stack(frame)[-6:]
                stack = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames[::-1])
                self._write(LongRun(running.kind, name_of(running.named), cpu_s, time.monotonic(), stack))

    def _write(self, run: LongRun) -> None:
        with self._lock:
            self._file.write(json.dumps(asdict(run)) + "\n")
            self._file.flush()


def name_of(function: Any) -> str:
    """Return the name of a callback: of a task's step, that of its coroutine."""
    if isinstance(function, functools.partial):
        is_in_context = getattr(function.func, "__name__", "") == "run" and function.args  # asyncio.to_thread
        return name_of(function.args[0] if is_in_context else function.func)
    owner = getattr(function, "__self__", None)
    coroutine = getattr(owner, "get_coro", lambda: None)()
    named = function if coroutine is None else coroutine
    return str(getattr(named, "__qualname__", named))


def loop_class(clock: Clock) -> type[uvloop.Loop]:
    """Return uvloop's loop with every callback timed."""
    timed = functools.partial(clock.run, "callback", MIN_CALLBACK_S)

    class TimedLoop(uvloop.Loop):
        def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None) -> Any:
            return super().call_soon(timed, callback, *args, context=context)

        def call_soon_threadsafe(self, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None) -> Any:
            return super().call_soon_threadsafe(timed, callback, *args, context=context)

        def call_later(self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None) -> Any:
            return super().call_later(delay, timed, callback, *args, context=context)

        def call_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None) -> Any:
            return super().call_at(when, timed, callback, *args, context=context)

        def add_reader(self, fd: Any, callback: Callable[[*Ts], object], *args: *Ts) -> Any:
            return super().add_reader(fd, timed, callback, *args)

        def add_writer(self, fd: Any, callback: Callable[[*Ts], object], *args: *Ts) -> Any:
            return super().add_writer(fd, timed, callback, *args)

        async def create_server(self, protocol_factory: Any, *args: Any, **settings: Any) -> Any:
            """Time the methods of each connection's protocol, too: the loop calls them itself."""

            def create_protocol() -> Any:
                protocol = protocol_factory()
                for name in ("connection_made", "data_received", "eof_received", "connection_lost", "resume_writing"):
                    setattr(protocol, name, functools.partial(timed, getattr(protocol, name)))
                return protocol

            return await super().create_server(create_protocol, *args, **settings)

    return TimedLoop


def install(clock: Clock) -> None:
    """Let the gateway's loop and every thread pool of this process run under the clock."""
    uvloop.run = functools.partial(uvloop.run, loop_factory=loop_class(clock))
    item_class: Any = concurrent.futures.thread._WorkItem
    run_item = item_class.run

    def run_timed(item: Any) -> None:
        clock.run("job", MIN_JOB_S, functools.partial(run_item, item), named=item.fn)

    item_class.run = run_timed


def main() -> None:
    # Imported here: a process that the gateway spawns imports this module again, and is not to be timed.
    from gateway.__main__ import main as run_gateway

    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    with open(os.environ[LOG], "a", encoding="utf-8") as file:
        install(Clock(file))
        run_gateway(sys.argv[1:])


if __name__ == "__main__":
    main()
