"""Send requests from a process of its own, a number at once for a time or a number a second, and compare latencies."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Report
from outrider.lab.load.figures import quantile
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
        return cls(sum(each.whole for each in outcomes) / took_s, outcomes)


@dataclass(frozen=True)
class LatencyTable:
    """Compares latencies of whole answers, one quantile a row."""

    heading: str
    columns: tuple[str, str]
    """Names of what is compared, the base first."""
    shares: Sequence[float]
    """Quantiles."""
    judged: Sequence[float]
    """Those whose ratio must be `max_ratio` at most."""
    max_ratio: float

    def add(self, report: Report, base: Sequence[RequestOutcome], other: Sequence[RequestOutcome]) -> list[str]:
        """Add the table; return the violations."""
        rows, violations = list[list[str]](), list[str]()
        for name, latency in LATENCIES.items():
            for share in self.shares:
                one_s = quantile([latency(each) for each in base if each.whole], share)
                other_s = quantile([latency(each) for each in other if each.whole], share)
                ratio = other_s / one_s
                what = f"{name}, p{100 * share:.0f}"
                rows.append([what, f"{1e3 * one_s:.0f}", f"{1e3 * other_s:.0f}", f"{ratio:.2f}"])
                if share in self.judged and not ratio <= self.max_ratio:
                    violations.append(f"{what}: {ratio:.2f} times that of the {self.columns[0]}")
        report.table(self.heading, ("", *self.columns, "ratio"), rows)
        return violations


LATENCIES: dict[str, Callable[[RequestOutcome], float]] = {
    "first token": lambda asked: asked.first_token_s,
    "whole answer": lambda asked: asked.total_s,
}


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
