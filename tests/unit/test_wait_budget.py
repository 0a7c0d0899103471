"""How long the target waits, and when a slow draft is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wait_budget import JUDGED_ROUNDS, MAX_SKIPPED_ROUNDS, Backoff, WaitBudget, Worth

SECONDS = st.floats(min_value=1e-6, max_value=100.0)


def test_unknown_is_the_longest() -> None:
    assert WaitBudget(0.005, 1.0).seconds == 1.0


def test_first_observation_is_rfc_6298() -> None:
    """Mean R, deviation R / 2: R + 4 R / 2."""
    budget = WaitBudget(0.0, 10.0)
    budget.observe(0.1)
    assert budget.seconds == pytest.approx(0.3)


def test_second_observation_is_rfc_6298() -> None:
    """Deviation 3/4 0.05 + 1/4 |0.1 - 0.2|, then mean 7/8 0.1 + 1/8 0.2."""
    budget = WaitBudget(0.0, 10.0)
    budget.observe(0.1)
    budget.observe(0.2)
    assert budget.seconds == pytest.approx(0.1125 + 4 * 0.0625)


def test_steady_proposals_need_hardly_more_than_they_take() -> None:
    budget = WaitBudget(0.001, 10.0)
    for _ in range(100):
        budget.observe(0.05)
    assert budget.seconds == pytest.approx(0.05, rel=1e-3)


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


def test_a_fresh_request_drafts() -> None:
    assert rounds_until_draft(Backoff()) == 0


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


def after(worth: Worth, *rounds: tuple[float, float, int]) -> bool:
    for wait_s, total_s, num_tokens in rounds:
        worth.observe(wait_s, total_s, num_tokens)
    return worth.is_lost


@pytest.mark.parametrize(("num_tokens", "lost"), [(1, True), (2, True), (6, False)])
def test_a_draft_is_worth_its_wait_by_the_tokens_it_brings(num_tokens: int, lost: bool) -> None:
    """A round of 20 ms, 15 of them waited, is four plain steps."""
    assert after(Worth(), *[(0.015, 0.020, num_tokens)] * 20) is lost


def test_it_is_not_judged_by_its_first_rounds_nor_by_a_single_slow_one() -> None:
    worth = Worth()
    assert not after(worth, *[(0.1, 0.105, 1)] * (JUDGED_ROUNDS - 1))
    assert after(worth, (0.1, 0.105, 1))
    steady = Worth()
    assert not after(steady, *[(0.002, 0.006, 3)] * 20, (0.030, 0.034, 3), *[(0.002, 0.006, 3)] * 20)


def test_one_round_in_time_brings_back_a_draft_that_was_slow() -> None:
    worth = Worth()
    assert after(worth, *[(0.1, 0.105, 3)] * 20)
    assert not after(worth, (0.002, 0.006, 3))
