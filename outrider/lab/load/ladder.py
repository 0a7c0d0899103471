"""Measures the speed of a gateway at several concurrencies, one after another. At each, the same requests run with
speculation and without, in turn. For `outrider tune --price`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from outrider.lab.load.figures import MIN_BATCHES, LoadFigures, RequestBatch, tokens_per_s
from outrider.lab.load.load import Load, RequestOutcome, keep_running

_REQUESTS_PER_PLACE = 2
"""Number of requests in a turn, as a multiple of the concurrency. With 2, half of the requests start when others
end."""

Report = Callable[[str, str, int, int], None]
"""Callback that shows the progress: `report(stage, text, elapsed seconds, total seconds)`. A stage is the measurement
at one concurrency."""


@dataclass(frozen=True)
class LadderPlan:
    """Numbers of concurrent requests to measure, and the seconds to spend on each of them."""

    concurrencies: Sequence[int]
    """Numbers of concurrent requests to measure, in this order."""
    seconds: float
    """Seconds per concurrency after which no further batch starts. If fewer than MIN_BATCHES pairs of batches are
    complete by then, further batches start until that many are complete."""


async def climb(client: httpx.AsyncClient, load: Load, plan: LadderPlan, report: Report) -> AsyncIterator[LoadFigures]:
    """Measure the speed at each concurrency of the plan, one concurrency after the other, and yield the figures of
    each.

    A set of requests runs in two batches: once with speculation by the gateway's defaults, and once without. The next
    set of requests runs in two batches too, in the opposite order, and so on until the time of the concurrency is over.
    The first requests at each concurrency are a warm-up and do not count.
    """
    plain_load = replace(load, extra={**load.extra, "speculation": {"enabled": False}})
    for concurrency in plan.concurrencies:
        stage = _Stage(report, f"{concurrency} at once", plan.seconds)
        for unmeasured in (load, plain_load):
            await keep_running(client, unmeasured, concurrency, iter(range(concurrency)))
        stage.start()
        speculative = list[RequestBatch]()
        plain = list[RequestBatch]()
        sides = [(load, speculative), (plain_load, plain)]
        for numbers in _request_numbers(concurrency):
            if stage.is_over and not _needs_more(speculative, plain):
                break
            for side_load, batches in sides:
                outcomes = await keep_running(client, side_load, concurrency, iter(numbers), stage.count)
                batches.append(RequestBatch(tuple(outcomes)))
            sides.reverse()
        stage.end()
        yield LoadFigures.of(concurrency, speculative, plain)


def _request_numbers(concurrency: int) -> Iterator[range]:
    # concurrency 4: 0 to 7, then 8 to 15
    num_requests = _REQUESTS_PER_PLACE * concurrency
    for first in itertools.count(0, num_requests):
        yield range(first, first + num_requests)


def _needs_more(speculative: Sequence[RequestBatch], plain: Sequence[RequestBatch]) -> bool:
    """Return whether there are too few turns for an interval, and further turns can help. They cannot if all requests
    of a side fail.
    """
    if not plain:
        return True
    if len(plain) >= MIN_BATCHES:
        return False
    return tokens_per_s(speculative) > 0 and tokens_per_s(plain) > 0


class _Stage:
    """Clock and counts of the measurement at one concurrency."""

    def __init__(self, report: Report, name: str, seconds: float) -> None:
        self._report = report
        self._name = name
        self._seconds = seconds
        self._num_requests = self._num_failed = 0
        self.start()

    def start(self) -> None:
        self._started_s = time.monotonic()
        self._show(0)

    @property
    def is_over(self) -> bool:
        return self._elapsed_s >= self._seconds

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def _total(self) -> int:
        return max(1, round(self._seconds))

    def count(self, outcome: RequestOutcome) -> None:
        self._num_requests += 1
        self._num_failed += not outcome.is_complete
        self._show(min(int(self._elapsed_s), self._total - 1))

    def end(self) -> None:
        self._show(self._total)

    def _show(self, done: int) -> None:
        text = f"{self._num_requests} requests"
        if self._num_failed:
            text += f", {self._num_failed} failed"
        self._report(self._name, text, done, self._total)
