"""Send requests from a process of its own, a number at once for a time or a number a second, and compare latencies."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Report
from outrider.lab.load.figures import quantile
from outrider.lab.load.load import Load, RequestOutcome, keep_running, send_request


def in_own_process(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """Run a loop in another process, so that the load does not burden the watching one, and return its outcomes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, function, arguments).result()


def _run(function: Callable[..., Coroutine[Any, Any, Any]], arguments: Sequence[Any]) -> Any:
    return asyncio.run(function(*arguments))


@dataclass(frozen=True)
class Sustainable:
    """What a closed loop got."""

    rate: float
    """Whole answers a second."""
    outcomes: list[RequestOutcome]

    @classmethod
    def of(cls, load: Load, concurrency: int, seconds: float) -> Sustainable:
        """Measure with as many requests as run at once."""
        outcomes = in_own_process(closed_loop, load, concurrency, seconds)
        took_s = max(each.ended_s for each in outcomes) - outcomes[0].sent_s
        return cls(sum(each.is_complete for each in outcomes) / took_s, outcomes)


LATENCIES: dict[str, Callable[[RequestOutcome], float]] = {
    "first token": lambda asked: asked.first_token_s,
    "whole answer": lambda asked: asked.total_s,
}


def add_latencies(
    report: Report,
    heading: str,
    phases: Mapping[str, Sequence[RequestOutcome]],
    shares: Sequence[float],
    max_ratios: Mapping[float, float],
) -> list[str]:
    """Add a table of the latencies of whole answers in two phases, a quantile of `shares` a row.

    max_ratios: the largest ratio of the second phase to the first, by quantile. Returns what is above it.
    """
    (base_name, base), (_, other) = phases.items()
    rows, violations = list[list[str]](), list[str]()
    for name, latency in LATENCIES.items():
        for share in shares:
            base_s = quantile([latency(each) for each in base if each.is_complete], share)
            other_s = quantile([latency(each) for each in other if each.is_complete], share)
            ratio = other_s / base_s
            what = f"{name}, p{100 * share:.0f}"
            rows.append([what, f"{1e3 * base_s:.0f}", f"{1e3 * other_s:.0f}", f"{ratio:.2f}"])
            if share in max_ratios and not ratio <= max_ratios[share]:
                violations.append(f"{what}: {ratio:.2f} times that of the {base_name}")
    report.table(heading, ("", *phases, "ratio"), rows)
    return violations


async def closed_loop(load: Load, concurrency: int, seconds: float) -> list[RequestOutcome]:
    """Keep `concurrency` requests running until the time is up; wait for those that run then."""

    def numbers() -> Iterator[int]:
        stop_s = time.monotonic() + seconds
        yield from itertools.takewhile(lambda _: time.monotonic() < stop_s, itertools.count())

    async with load.client() as client:
        return await keep_running(client, load, concurrency, numbers())


async def open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[RequestOutcome]]:
    """Send Poisson arrivals, phase after phase of (requests a second, seconds), whatever becomes of those before."""
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
