"""Circuit breakers and the retry budget, by a clock of the test's own."""

from __future__ import annotations

import pytest

from gateway.breaker import (
    FIRST_PAUSE_S,
    MAX_FAILURES,
    MAX_PAUSE_S,
    REQUESTS_PER_RETRY,
    RESERVE_S,
    Breaker,
    RetryBudget,
)
from tests.unit.test_metrics import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    """Without jitter: pauses last their half."""
    return Breaker(clock=clock, jitter=lambda: 0.0)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_only_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(3):
        fail(breaker, MAX_FAILURES - 1)
        assert not breaker.is_open
        breaker.succeeded()
    fail(breaker, MAX_FAILURES)
    assert breaker.is_open
    assert not breaker.allows


def test_one_probe_after_a_pause_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, MAX_FAILURES)
    clock.now += FIRST_PAUSE_S / 2 - 0.001
    assert not breaker.allows
    clock.now += 0.001
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows, "one request at a time"
    breaker.succeeded()
    assert breaker.allows
    assert not breaker.is_open


def test_pauses_double_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, MAX_FAILURES)
    pauses = []
    for _ in range(8):
        started = clock.now
        while not breaker.allows:
            clock.now += 0.01
        pauses.append(clock.now - started)
        breaker.begin()
        breaker.failed()
    expected = [min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**n) / 2 for n in range(8)]
    assert pauses == pytest.approx(expected, abs=0.02)


def test_a_probe_that_is_never_heard_of_makes_room_for_another(breaker: Breaker, clock: Clock) -> None:
    """Its client may have left."""
    fail(breaker, MAX_FAILURES)
    clock.now += FIRST_PAUSE_S
    breaker.begin()
    assert not breaker.allows
    clock.now += FIRST_PAUSE_S
    assert breaker.allows


def test_failures_of_what_was_under_way_do_not_prolong_the_pause(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 64)
    clock.now += FIRST_PAUSE_S / 2
    assert breaker.allows


def test_a_trip_needs_no_second_failure_and_a_new_life_is_probed_at_once(breaker: Breaker) -> None:
    breaker.trip()
    assert breaker.is_open
    assert not breaker.allows
    breaker.restarted()
    assert breaker.is_open
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows, "by one request"


def test_where_there_is_nobody_else_pauses_are_short(breaker: Breaker, clock: Clock) -> None:
    breaker.trip()
    for _ in range(8):
        clock.now += 2 * MAX_PAUSE_S
        breaker.begin()
        breaker.failed()
    assert not breaker.allows_after(1.0)
    clock.now += 1.0
    assert breaker.allows_after(1.0)
    assert not breaker.allows
    breaker.begin()
    assert not breaker.allows_after(1.0), "one request at a time all the same"
    breaker.succeeded()
    assert breaker.allows_after(1.0)


def test_jitter_is_within_the_upper_half(clock: Clock) -> None:
    for value in (0.0, 0.5, 0.999):
        breaker = Breaker(clock=clock, jitter=lambda value=value: value)
        breaker.trip()
        started = clock.now
        while not breaker.allows:
            clock.now += 0.001
        assert clock.now - started == pytest.approx(FIRST_PAUSE_S * (0.5 + value / 2), abs=0.002)


def test_retries_are_a_share_of_the_requests_on_top_of_a_floor(clock: Clock) -> None:
    budget = RetryBudget(2.0, clock)
    assert sum(budget.take() for _ in range(100)) == 2.0 * RESERVE_S, "the reserve of an idle gateway"
    for _ in range(50):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == 50 / REQUESTS_PER_RETRY
    clock.now += 3.0
    assert sum(budget.take() for _ in range(100)) == 6
    clock.now += 1000.0
    assert sum(budget.take() for _ in range(100)) == 2.0 * RESERVE_S, "no more is saved up"
