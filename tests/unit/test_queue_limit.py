"""Who may wait, against arrivals that are simulated: those who are let in keep their pace, and places stay in use."""

from __future__ import annotations

import heapq
import random
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from gateway.admission.queue import BURST_S, QueueEstimate, QueueLimit

MOST_WAIT_S = 0.5


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulation:
    """Answers that hold their place for 1.44 to 1.76 s, first come, first served."""

    num_places: int
    clock: Clock = field(default_factory=Clock)
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    waits_s: list[float] = field(default_factory=list)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.estimate = QueueEstimate(self.num_places, self.clock)
        self.limit = QueueLimit(MOST_WAIT_S, self.clock)
        self._running: list[tuple[float, int, ExitStack]] = []
        self._line: deque[float] = deque()
        self._number = 0

    def arrive(self, at_s: float) -> None:
        while self._running and self._running[0][0] <= at_s:
            self.clock.now, _, block = heapq.heappop(self._running)
            block.close()
            if self._line:
                self._begin(self._line.popleft())
        self.clock.now = at_s
        num_admitted = len(self._running) + len(self._line)
        if not self.limit.admits(self.num_places, num_admitted, self.estimate.wait_s(num_admitted)):
            self.num_refused += 1
        elif num_admitted < self.num_places:
            self._begin(at_s)
        else:
            self._line.append(at_s)

    def _begin(self, came_s: float) -> None:
        block = ExitStack()
        block.enter_context(self.estimate.served())
        self._number += 1
        heapq.heappush(self._running, (self.clock.now + self.dice.uniform(1.44, 1.76), self._number, block))
        self.waits_s.append(self.clock.now - came_s)

    def poisson(self, share: float, seconds: float) -> tuple[list[float], float]:
        """At so many times the rate that fills all places -> (waits of those that began, share of refused)."""
        rate = share * self.num_places / 1.6
        end_s, num_before, refused_before, num_asked = self.clock.now + seconds, len(self.waits_s), self.num_refused, 0
        while (at_s := self.clock.now + self.dice.expovariate(rate)) < end_s:
            self.arrive(at_s)
            num_asked += 1
        return sorted(self.waits_s[num_before:]), (self.num_refused - refused_before) / num_asked


@pytest.mark.parametrize("num_places", [16, 64])
def test_at_four_times_the_rate_hardly_anybody_waits_and_places_stay_in_use(num_places: int) -> None:
    simulation = Simulation(num_places)
    _, refused_before = simulation.poisson(0.7, 60.0)
    waits_s, _ = simulation.poisson(4.0, 60.0)
    _, refused_after = simulation.poisson(0.7, 60.0)
    assert max(refused_before, refused_after) < 0.05
    assert waits_s[len(waits_s) * 95 // 100] < 0.1
    assert waits_s[-1] < 2 * MOST_WAIT_S
    assert len(waits_s) > 0.93 * 60.0 * num_places / 1.6


def test_a_burst_at_an_idle_model_is_let_in_whole_and_then_nobody_until_it_is_through() -> None:
    simulation = Simulation(16)
    simulation.poisson(0.1, 60.0)
    from_s = simulation.clock.now + 10.0
    for index in range(200):
        simulation.arrive(from_s + 0.9 * BURST_S * index / 200)
    assert simulation.num_refused == 0
    simulation.arrive(from_s + 5.0)
    assert simulation.num_refused == 1
    simulation.arrive(from_s + 60.0)
    assert simulation.num_refused == 1


def test_two_who_take_turns_at_one_place_are_never_refused() -> None:
    """The one who waits finds nobody waiting, though its turn is longer away than the limit."""
    limit = QueueLimit(MOST_WAIT_S, clock := Clock())
    assert limit.admits(1, 0, 0.0)
    for _ in range(5):
        clock.now += 8.0
        assert limit.admits(1, 1, 8.0)
