"""Threads that tokenise long texts, so that the event loop is not blocked. `Admission` has one set of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from outrider.wire.processes.processes import release_freed_memory

NUM_THREADS = 4
"""Number of threads that tokenise long texts."""
THREAD_NICENESS = 5
"""Niceness of the threads that tokenise long texts, on Linux. It lies between that of the event loop (0) and that of
the processes that render chats and check grammars (10)."""
LARGEST_CHARS = 1 << 20
"""Length in characters above which only one text, of all callers, is tokenised at a time. Tokenising a text of 2**20
tokens takes 400 MB."""

RELEASED_CHARS = 1 << 17
"""Length of a text, in characters, above which the memory that its tokenisation used is given back to the kernel
afterwards. A text of this length uses 50 MB, which glibc would otherwise keep in an arena of each thread."""

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """Threads that tokenise texts too long for the event loop. Only one event loop uses them, so there is no lock.

    For a caller with an API key, at most two texts are tokenised at a time, one up to LARGEST_CHARS and one above, so
    that it never holds all threads. For all callers together, only one text above LARGEST_CHARS is tokenised at a time,
    because each of its tokens takes 400 bytes.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "texts", initializer=_lower_priority)
        self._limits: WeakValueDictionary[tuple[bytes, bool], asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by caller: one for its texts above LARGEST_CHARS (True), one for its other texts (False)."""
        self._largest = asyncio.Semaphore(1)

    async def run(self, caller: bytes, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which reads `num_chars` characters, on a thread, and return its result.

        A thread cannot be stopped: if this call is cancelled, the thread counts as the caller's until `work` returns.
        """
        is_largest = num_chars > LARGEST_CHARS
        limit = self._limit(caller, is_largest)
        await limit.acquire()
        held = [limit]
        if is_largest:
            try:
                await self._largest.acquire()
            except asyncio.CancelledError:
                limit.release()
                raise
            held.append(self._largest)
        loop = asyncio.get_running_loop()

        def release() -> None:
            for semaphore in held:
                semaphore.release()

        def note_end(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(release)

        @functools.wraps(work)
        def do_work() -> T:
            try:
                return work(*args, **kwargs)
            finally:
                if num_chars > RELEASED_CHARS:
                    release_freed_memory()

        future = self._executor.submit(do_work)
        future.add_done_callback(note_end)
        return await asyncio.wrap_future(future)

    def _limit(self, caller: bytes, is_largest: bool) -> asyncio.Semaphore:
        limit = self._limits.get((caller, is_largest))
        if limit is None:
            num_threads = 1
            if not caller and not is_largest:  # callers without a key share one semaphore
                num_threads = NUM_THREADS - 1
            limit = asyncio.Semaphore(num_threads)
            self._limits[caller, is_largest] = limit
        return limit


def _lower_priority() -> None:
    # On Linux each thread has a niceness of its own, so this affects the calling thread alone.
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it, or the process has a higher niceness already
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICENESS)
