"""How long the target waits, and when a slow draft is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.wait_budget import MAX_SKIPPED_ROUNDS, Backoff, WaitBudget

SECONDS = st.floats(min_value=1e-6, max_value=100.0)


def test_it_follows_a_draft_that_becomes_slower_and_faster() -> None:
    budget = WaitBudget(0.001, 10.0)
    for propose_s in [0.02] * 50 + [0.2] * 50:
        budget.observe(propose_s)
    assert budget.seconds == pytest.approx(0.2, rel=0.05)
    for _ in range(100):
        budget.observe(0.01)
    assert budget.seconds == pytest.approx(0.01, rel=0.05)


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_within_its_bounds_and_never_below_the_mean(observed: list[float]) -> None:
    budget = WaitBudget(0.005, 1.0)
    free = WaitBudget(0.0, 1e9)
    for propose_s in observed:
        budget.observe(propose_s)
        free.observe(propose_s)
    assert 0.005 <= budget.seconds <= 1.0
    assert free.seconds >= min(observed) * (1 - 1e-9)


def rounds_until_draft(backoff: Backoff) -> int:
    """Plain rounds before the next one that may draft."""
    skipped = 0
    while not backoff.may_draft():
        skipped += 1
    return skipped


def test_late_proposals_in_a_row_double_the_pause() -> None:
    backoff = Backoff()
    pauses = []
    for _ in range(9):
        backoff.late()
        pauses.append(rounds_until_draft(backoff))
    assert pauses == [2, 4, 8, 16, 32, 64, MAX_SKIPPED_ROUNDS, MAX_SKIPPED_ROUNDS, MAX_SKIPPED_ROUNDS]


def test_one_in_time_forgets_the_late_ones() -> None:
    backoff = Backoff()
    for _ in range(4):
        backoff.late()
        rounds_until_draft(backoff)
    backoff.in_time()
    assert rounds_until_draft(backoff) == 0
    backoff.late()
    assert rounds_until_draft(backoff) == 2
