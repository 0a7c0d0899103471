"""Compile the grammars of slots that are being opened, one at a time, on a thread of lower priority than the engine's.

The gateway has checked each grammar, so compiling takes about a second at most. Called by `worker_service`, on the gRPC
loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from outrider.engine.sampling.grammar_state import Grammar, Grammars
from outrider.wire.requests.scheduling import Scheduling, VirtualTokens

NICENESS = 10
"""Number added to the niceness of the thread that compiles."""
STACK_BYTES = 16 << 20
"""Stack size of the thread that compiles, in bytes. Compiling recurses. The size is four times the stack with which the
gateway checks grammars."""


@dataclass(eq=False)
class _Compile:
    scheduling: Scheduling
    granted: asyncio.Future[None]


class GrammarCompiler:
    """Compiler of grammars, on one thread, with a queue that is fair between callers.

    Next comes a grammar of the caller whose grammars have taken the least compile time so far, relative to the caller's
    weight.
    """

    def __init__(self) -> None:
        self._thread = _create_thread()
        self._waiting: list[_Compile] = []
        self._running: _Compile | None = None
        self._served = VirtualTokens()
        """Compile time per caller, in seconds."""

    async def compile(self, grammars: Grammars, text: str, scheduling: Scheduling) -> Grammar | None:
        """Wait until this grammar is next in the queue, compile its text, and return the compiled grammar. Return None
        if the request is to be served as if it had no grammar. Raises InvalidRequest for a text that cannot be
        followed.

        If the call is cancelled while it waits, nothing is compiled. scheduling: caller and weight of the request.
        """
        loop = asyncio.get_running_loop()
        job = _Compile(scheduling, loop.create_future())
        self._waiting.append(job)
        self._grant()
        try:
            await job.granted
        except asyncio.CancelledError:
            self._leave(job)
            raise
        began_s = time.monotonic()
        work = loop.run_in_executor(self._thread, grammars.compile, text)
        work.add_done_callback(lambda done: self._finish(job, done, began_s))
        return await asyncio.shield(work)  # a compilation under way is finished, and the next waits for it

    def _grant(self) -> None:
        if self._running is not None or not self._waiting:
            return
        self._served.wait({job.scheduling.caller: job.scheduling.weight for job in self._waiting}, ())
        self._running = min(self._waiting, key=lambda job: self._served.served(job.scheduling.caller))
        self._waiting.remove(self._running)
        self._running.granted.set_result(None)

    def _leave(self, job: _Compile) -> None:
        if job is self._running:
            self._running = None
            self._grant()
        else:
            self._waiting.remove(job)

    def _finish(self, job: _Compile, work: asyncio.Future[Grammar | None], began_s: float) -> None:
        if not work.cancelled():
            work.exception()  # retrieved here, as no caller may wait for it any more
        caller, weight = job.scheduling.caller, job.scheduling.weight
        waiting = {other.scheduling.caller: other.scheduling.weight for other in self._waiting}
        self._served.wait({**waiting, caller: weight}, ())
        self._served.add_served(caller, time.monotonic() - began_s)
        self._running = None
        self._grant()


def _create_thread() -> ThreadPoolExecutor:
    previous = threading.stack_size(STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=_lower_priority)
        executor.submit(threading.get_ident).result()
        return executor
    finally:
        threading.stack_size(previous)


def _lower_priority() -> None:
    """Linux has a niceness per thread; elsewhere it belongs to the process."""
    if sys.platform == "linux":
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + NICENESS)
