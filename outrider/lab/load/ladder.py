"""Climb the ladder: at each concurrency the same requests with speculation and without, turn by turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from outrider.cli.progress import StageProgress
from outrider.lab.load.figures import LEAST_TURNS, RungFigures, Turn
from outrider.lab.load.load import Asked, Load, keep_running

PLAIN = {"speculation": {"enabled": False}}
_REQUESTS_PER_PLACE = 2
"""Requests of a turn for each that runs at once. Doubling it halves the share of a turn in which its last answers run
beside fewer than `concurrency`, and the turns that a rung has time for.
"""


@dataclass(frozen=True)
class Plan:
    """How far the ladder goes, and how long each rung is."""

    concurrencies: Sequence[int]
    num_requests: int | None
    """Of each arm of a rung; None = as many as the time allows."""
    seconds: float | None
    """After which no turn of a rung begins, once it has as many as an interval needs; None = no end by time."""


async def climb(
    client: httpx.AsyncClient, load: Load, plan: Plan, both_arms: bool, progress: StageProgress
) -> AsyncIterator[RungFigures]:
    """Measure all rungs, and yield each as it is through. The first requests of a rung, one for each place and arm, do
    not count.

    both_arms: whether the server takes `speculation`; else one arm, of what it does by itself.
    """
    loads = {"with": load, "without": replace(load, extra={**load.extra, **PLAIN})} if both_arms else {"": load}
    for concurrency in plan.concurrencies:
        turns: dict[str, list[Turn]] = {name: [] for name in loads}
        for own in loads.values():
            await keep_running(client, own, concurrency, iter(range(concurrency)))
        told = _Told(progress, plan, concurrency, len(loads))
        for index, numbers in enumerate(_turns(plan, concurrency, turns)):
            for name in list(loads) if index % 2 == 0 else reversed(loads):
                asked = await keep_running(client, loads[name], concurrency, iter(numbers), told.asked)
                turns[name].append(Turn(tuple(asked)))
        told.end()
        yield RungFigures.of(concurrency, *list(turns.values()), *(() if both_arms else ([],)))


def _too_few(turns: Mapping[str, Sequence[Turn]]) -> bool:
    """Return whether more would make an interval: they do not of one arm, or where an arm has no whole answer."""
    short = all(len(own) < LEAST_TURNS and any(turn.whole for turn in own) for own in turns.values())
    return len(turns) > 1 and short


def _turns(plan: Plan, concurrency: int, taken: Mapping[str, Sequence[Turn]]) -> Iterator[range]:
    """Yield the numbers of each turn's requests while the rung goes on. taken: of each arm, as they come."""
    began_s, size = time.monotonic(), _REQUESTS_PER_PLACE * concurrency
    for first in itertools.count(0, size):
        if plan.num_requests is not None and first >= plan.num_requests:
            return
        is_over = plan.seconds is not None and time.monotonic() - began_s >= plan.seconds
        if first and is_over and not _too_few(taken):
            return
        yield range(first, first + size if plan.num_requests is None else min(first + size, plan.num_requests))


class _Told:
    """Tells how far a rung is: by its requests where they are counted, else by its seconds."""

    def __init__(self, progress: StageProgress, plan: Plan, concurrency: int, num_arms: int) -> None:
        self._progress = progress
        self._stage = f"{concurrency} at once"
        self._began_s = time.monotonic()
        self._num_asked = self._num_failed = 0
        self._by_requests = plan.num_requests is not None
        self._total = max(1, round(plan.seconds or 0) if plan.num_requests is None else num_arms * plan.num_requests)
        self._tell(0)

    def asked(self, asked: Asked) -> None:
        self._num_asked += 1
        self._num_failed += not asked.whole
        done = self._num_asked if self._by_requests else int(time.monotonic() - self._began_s)
        self._tell(min(done, self._total - 1))

    def end(self) -> None:
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        unit, asked = (" requests", "") if self._by_requests else (" s", f"{self._num_asked} requests")
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        self._progress.tell(self._stage, ", ".join(filter(None, (asked, failed))), done, self._total, unit)
