"""Send requests from a process of its own: a number at once for a time, or a number a second."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from outrider.lab.load.load import Load, RequestOutcome, keep_running, send_request


def closed_loop(load: Load, concurrency: int, seconds: float) -> list[RequestOutcome]:
    """Keep `concurrency` requests running until the time is up; wait for those that run then."""
    return asyncio.run(_closed_loop(load, concurrency, seconds))


def open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[RequestOutcome]]:
    """Send Poisson arrivals, phase after phase of (requests a second, seconds), whatever becomes of those before."""
    return asyncio.run(_open_loop(load, phases))


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in another process, so that the load does not burden the watching one, and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


async def _closed_loop(load: Load, concurrency: int, seconds: float) -> list[RequestOutcome]:
    def numbers() -> Iterator[int]:
        stop_s = time.monotonic() + seconds
        yield from itertools.takewhile(lambda _: time.monotonic() < stop_s, itertools.count())

    async with load.client() as client:
        return await keep_running(client, load, concurrency, numbers())


async def _open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[RequestOutcome]]:
    dice, numbers = random.Random(0), itertools.count()
    tasks: list[list[asyncio.Task[RequestOutcome]]] = []
    async with load.client() as client:
        next_s = time.monotonic()
        for rate, seconds in phases:
            tasks.append([])
            end_s = next_s + seconds
            while (next_s := next_s + dice.expovariate(rate)) < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks[-1].append(asyncio.create_task(send_request(client, load, next(numbers))))
            next_s = end_s
        return [list(await asyncio.gather(*phase)) for phase in tasks]
