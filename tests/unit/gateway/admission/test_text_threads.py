"""Threads that tokenise long texts leave the event loop and other callers alone."""

import asyncio
import os
import sys
import threading

import pytest

from gateway.admission.text_threads import LARGEST_CHARS, NUM_THREADS, THREAD_NICENESS, TextThreads
from tests.unit.gateway.admission.asked import THREADS


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a niceness of its own on Linux alone")
async def test_the_event_loop_goes_before_threads_that_read_texts() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await THREADS.run(b"", 1, niceness) >= THREAD_NICENESS
    assert niceness() == os.nice(0)


async def test_the_long_texts_of_one_caller_keep_no_other_waiting() -> None:
    threads, go_on = TextThreads(), threading.Event()
    greedy = [asyncio.create_task(threads.run(b"greedy", 1, go_on.wait, 20)) for _ in range(2 * NUM_THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run(b"other", 1, lambda: 1), 10) == 1
    greedy[0].cancel()
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run(b"other", 1, lambda: 2), 10) == 2, "a thread is held until it ends"
    largest = [asyncio.create_task(threads.run(b"", LARGEST_CHARS + 1, go_on.wait, 20)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run(b"", 1, lambda: 3), 10) == 3, "the largest take one thread"
    go_on.set()
    assert await asyncio.gather(*largest) == [True] * NUM_THREADS
    assert await asyncio.gather(*greedy[1:]) == [True] * (2 * NUM_THREADS - 1)
