"""What a target's steps take, learnt from single ones that are noisy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.step_model import FORGET_S, StepModel
from gateway.typical import Typical


def taught(*steps: tuple[int, int, float], times: int = 40, noise: float = 0.0) -> StepModel:
    model, dice = StepModel(), random.Random(0)
    for _ in range(times):
        for num_slots, num_tokens, seconds in steps:
            model.note(num_slots, num_tokens, seconds * dice.gauss(1.0, noise))
    return model


def test_nothing_is_known_at_first() -> None:
    assert StepModel().seconds(1, 1) == 0.0


def test_a_single_size_says_the_same_of_all() -> None:
    model = taught((4, 4, 0.02))
    assert [model.seconds(4, n) for n in (1, 4, 100)] == pytest.approx([0.02] * 3)


def test_between_two_sizes_a_straight_line_and_beyond_them_further_along_it() -> None:
    model = taught((1, 1, 0.020), (1, 5, 0.024), (1, 7, 0.030))
    assert model.seconds(1, 3) == pytest.approx(0.022)
    assert model.seconds(1, 6) == pytest.approx(0.027)
    assert model.seconds(1, 17) == pytest.approx(0.030 + 10 * 0.010 / 6, rel=0.2)
    assert model.seconds(1, 1) == pytest.approx(0.020)


def test_beyond_the_largest_never_more_than_in_proportion() -> None:
    model = taught((1, 1, 0.001), (1, 2, 0.100))
    assert model.seconds(1, 20) <= 1.0 + 1e-9


def test_what_a_slot_costs_is_told_from_what_a_token_costs() -> None:
    """20 ms, 1 ms a slot, 0.5 ms a token."""
    sizes = [(1, 4), (4, 4), (2, 8), (8, 8), (4, 16), (16, 16)]
    model = taught(*((b, n, 0.020 + 0.001 * b + 0.0005 * n) for b, n in sizes), times=400)
    for b, n in [(1, 4), (4, 4), (8, 8), (2, 8), (16, 16), (8, 16)]:
        assert model.seconds(b, n) == pytest.approx(0.020 + 0.001 * b + 0.0005 * n, rel=0.06)


def test_plain_steps_say_what_tokens_cost_and_nothing_of_slots() -> None:
    """One token for each slot: 3 ms for both. More tokens of the same slots are then known to cost something."""
    rng = random.Random(0)
    model = StepModel()
    for _ in range(100):
        for n in (1, 2, 4, 8, 11, 14, 18, 23, 29, 36, 45, 52, 58, 61, 64):
            model.note(n, n, (0.045 + 0.003 * n) * rng.gauss(1.0, 0.05))
    assert model.seconds(64, 128) == pytest.approx(0.045 + 0.003 * 128, rel=0.1)


def test_steps_with_prompts_are_a_hint_until_there_is_one_without() -> None:
    model = taught((1, 1, 0.02))
    model.note(2, 64, 0.100, with_prompts=True)
    assert model.seconds(1, 64) == pytest.approx(0.100)
    model.note(8, 64, 0.050)
    model.note(2, 64, 0.100, with_prompts=True)
    assert model.seconds(8, 64) == pytest.approx(0.050)


def test_hints_of_steps_with_prompts_are_dropped_once_others_say_what_a_token_costs() -> None:
    """Most of a prompt's tokens are not sampled from: as many drafts take longer."""
    model = taught((64, 64, 0.250))
    model.note(8, 264, 0.500, with_prompts=True)
    assert model.seconds(64, 264) == pytest.approx(0.500)
    model.note(60, 60, 0.240)
    assert model.seconds(64, 264) == pytest.approx(0.500), "these two are too near each other"
    model.note(16, 16, 0.080)
    assert model.seconds(64, 128) > 0.420
    model.note(8, 264, 0.500, with_prompts=True)
    assert model.seconds(64, 128) > 0.420


def test_sizes_that_were_not_seen_for_long_are_forgotten_though_steps_with_prompts_have_them() -> None:
    model = StepModel()
    for second in range(10):
        model.note(8, 8, 0.020, now=second)
        model.note(8, 40, 0.500, now=second)
    for second in range(10, 10 + int(FORGET_S * 1.5)):
        model.note(8, 8, 0.020, now=second)
        model.note(8, 40, 0.030, with_prompts=True, now=second)
    assert model.seconds(8, 40) < 0.040


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 400), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
def test_never_negative_and_never_nothing(steps: list[tuple[int, int, float]]) -> None:
    model = StepModel()
    for num_slots, num_more, seconds in steps:
        model.note(num_slots, num_slots + num_more, seconds)
    for num_tokens in (1, 3, 17, 300, 5000):
        assert 0.0 <= model.seconds(4, num_tokens) < 1e4


def test_outliers_hardly_move_a_typical_time_and_a_change_does_soon() -> None:
    typical, dice = Typical(), random.Random(0)
    for index in range(500):
        typical.observe(0.3 if index % 25 == 24 else dice.gauss(0.02, 0.001))
    assert typical.value == pytest.approx(0.02, rel=0.08)
    for _ in range(40):
        typical.observe(dice.gauss(0.06, 0.002))
    assert typical.value == pytest.approx(0.06, rel=0.05)


def test_a_first_value_that_was_an_outlier_is_forgotten() -> None:
    typical = Typical()
    for value in [1.0] + [0.02] * 60:
        typical.observe(value)
    assert typical.value == pytest.approx(0.02, rel=0.1)
