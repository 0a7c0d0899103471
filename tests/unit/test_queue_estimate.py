"""The expected wait for a place, on a clock of the test's own and against a queue that is simulated."""

from __future__ import annotations

import heapq
import random
from contextlib import ExitStack

import pytest

from gateway.admission.queue import QueueEstimate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(estimate: QueueEstimate, clock: Clock, seconds: float) -> None:
    with estimate.served():
        clock.now += seconds


def test_a_free_place_is_not_waited_for_and_each_ahead_adds_its_share() -> None:
    clock = Clock()
    estimate = QueueEstimate(4, clock)
    assert estimate.wait_s(100) == 0.0, "nothing is known"
    serve(estimate, clock, 8.0)
    assert [estimate.wait_s(ahead) for ahead in (0, 3, 4, 5, 103)] == [0.0, 0.0, 2.0, 4.0, 200.0]


def test_answers_that_do_not_end_count_by_their_age() -> None:
    clock = Clock()
    estimate = QueueEstimate(2, clock)
    serve(estimate, clock, 1.0)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(estimate.served())
        clock.now += 60.0
        assert estimate.wait_s(2) == pytest.approx(30.0)
    assert estimate.service_s() > 30.0, "and when they have ended, by what they took"


@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_is_near_the_waits_of_a_real_queue(seed: int) -> None:
    """64 places, exponential service of mean 2 s, twice what they can do arrives until 500 wait."""
    rng, clock, places, mean_s = random.Random(seed), Clock(), 64, 2.0
    estimate = QueueEstimate(places, clock)
    ends: list[float] = []  # of the running ones
    blocks: dict[float, ExitStack] = {}
    waiting: list[tuple[float, float]] = []  # (arrived, expected wait)
    errors: list[float] = []
    arrival = 0.0
    while arrival < 40.0:
        while ends and ends[0] <= arrival:
            clock.now = heapq.heappop(ends)
            blocks.pop(clock.now).close()
            if waiting:
                arrived, expected = waiting.pop(0)
                if arrived > 10.0:
                    errors.append((expected - (clock.now - arrived)) / max(clock.now - arrived, 1.0))
                _start(estimate, clock, ends, blocks, rng.expovariate(1 / mean_s))
        clock.now = arrival
        if len(ends) < places:
            _start(estimate, clock, ends, blocks, rng.expovariate(1 / mean_s))
        else:
            waiting.append((arrival, estimate.wait_s(len(ends) + len(waiting))))
        arrival += rng.expovariate(2 * places / mean_s)
    assert len(errors) > 100
    assert abs(sum(errors) / len(errors)) < 0.35, "right on average"


def _start(
    estimate: QueueEstimate, clock: Clock, ends: list[float], blocks: dict[float, ExitStack], service_s: float
) -> None:
    end = clock.now + service_s
    blocks[end] = ExitStack()
    blocks[end].enter_context(estimate.served())
    heapq.heappush(ends, end)
