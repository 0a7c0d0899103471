"""The expected wait for a place, on a clock of the test's own."""

from __future__ import annotations

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
