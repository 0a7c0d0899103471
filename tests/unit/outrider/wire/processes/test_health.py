"""When a peer is left alone and tried again, and the retry budget, by a clock of the test's own."""

import pytest

from gateway.workers.retry_budget import CHOICES_PER_RETRY, RESERVE_S, RetryBudget
from outrider.wire.processes.health import ALONE_S, FIRST_PAUSE_S, MAX_PAUSE_S, CallOutcome, Health
from tests.unit.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    """Without jitter: pauses last their half."""
    return Health(clock, jitter=lambda: 0.0)


def note(health: Health, outcome: CallOutcome, times: int = 1) -> None:
    for _ in range(times):
        health.note(outcome)


@pytest.mark.parametrize(("outcome", "most"), [(CallOutcome.LATE, 5), (CallOutcome.REFUSED, 3), (CallOutcome.LOST, 1)])
def test_only_failures_in_a_row_put_it_down(health: Health, outcome: CallOutcome, most: int) -> None:
    for _ in range(3):
        note(health, outcome, most - 1)
        assert health.is_usable and not health.is_down
        health.note(CallOutcome.OK)
    note(health, outcome, most)
    assert health.is_down and not health.is_usable


def test_one_probe_after_a_pause_brings_it_back(health: Health, clock: Clock) -> None:
    note(health, CallOutcome.REFUSED, 64)  # those that were under way do not prolong the pause
    clock.now += FIRST_PAUSE_S / 2 - 0.001
    assert not health.is_usable
    clock.now += 0.001
    assert health.is_usable
    health.begin("probe")
    assert not health.is_usable, "one request at a time"
    assert health.allows("probe") and not health.allows("another")
    health.note(CallOutcome.OK)
    assert health.is_usable and not health.is_down and health.allows("another")


def test_pauses_double_up_to_a_bound(health: Health, clock: Clock) -> None:
    health.note(CallOutcome.LOST)
    pauses = []
    for _ in range(8):
        started = clock.now
        while not health.is_usable:
            clock.now += 0.01
        pauses.append(clock.now - started)
        health.begin("probe")
        health.note(CallOutcome.REFUSED)
        assert not health.allows("probe")
    assert pauses == pytest.approx([min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**n) / 2 for n in range(8)], abs=0.02)


def test_a_probe_without_outcome_is_replaced_by_another(health: Health, clock: Clock) -> None:
    """Its client may have left."""
    health.note(CallOutcome.LOST)
    clock.now += FIRST_PAUSE_S
    health.begin("probe")
    assert not health.is_usable
    clock.now += FIRST_PAUSE_S
    assert health.is_usable


def test_a_new_life_is_probed_at_once(health: Health) -> None:
    health.note(CallOutcome.LOST)
    health.restarted()
    assert health.is_down and health.is_usable
    health.begin("probe")
    assert not health.is_usable, "by one request"


def test_without_other_workers_pauses_are_short(health: Health, clock: Clock) -> None:
    health.note(CallOutcome.LOST)
    for _ in range(8):
        clock.now += 2 * MAX_PAUSE_S
        health.begin("probe")
        health.note(CallOutcome.REFUSED)
    assert not health.is_usable_alone
    clock.now += ALONE_S
    assert health.is_usable_alone and not health.is_usable
    health.begin("probe")
    assert not health.is_usable_alone, "one request at a time all the same"


@pytest.mark.parametrize("value", [0.0, 0.5, 0.999])
def test_jitter_is_within_the_upper_half(clock: Clock, value: float) -> None:
    health, started = Health(clock, jitter=lambda: value), clock.now
    health.note(CallOutcome.LOST)
    while not health.is_usable:
        clock.now += 0.001
    assert clock.now - started == pytest.approx(FIRST_PAUSE_S * (0.5 + value / 2), abs=0.002)


def test_retries_are_a_share_of_the_requests_on_top_of_a_floor(clock: Clock) -> None:
    budget = RetryBudget(2.0, clock)
    assert sum(budget.use_retry() for _ in range(100)) == 2.0 * RESERVE_S, "the reserve of an idle gateway"
    for _ in range(50):
        budget.note_choice()
    assert sum(budget.use_retry() for _ in range(100)) == 50 / CHOICES_PER_RETRY
    clock.now += 3.0
    assert sum(budget.use_retry() for _ in range(100)) == 6
    clock.now += 1000.0
    assert sum(budget.use_retry() for _ in range(100)) == 2.0 * RESERVE_S, "no more is saved up"
