"""What one step for all saves over two, as the steps themselves tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.engine.step_cost import StepCost


def learnt(step_s: Callable[[int], float], sizes: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 15, 20, 30)) -> StepCost:
    cost = StepCost()
    for _ in range(50):
        for size in sizes:
            cost.note(size, 0, step_s(size))
    return cost


def test_all_of_a_step_while_it_reads_weights() -> None:
    assert learnt(lambda tokens: 0.030).joined_saves_s(20) == pytest.approx(0.030)


def test_nothing_once_every_token_takes_its_time() -> None:
    assert learnt(lambda tokens: 0.002 * tokens).joined_saves_s(20) == pytest.approx(0.0, abs=0.005)


def test_what_a_step_takes_without_tokens_between_the_two() -> None:
    assert learnt(lambda tokens: 0.010 + 0.001 * tokens).joined_saves_s(20) == pytest.approx(0.010, abs=0.003)


def test_noise_makes_it_neither_less_than_nothing_nor_more_than_a_step() -> None:
    assert learnt(lambda tokens: 0.001 * tokens**2).joined_saves_s(20) == 0.0
    assert learnt(lambda tokens: 0.030 if tokens < 16 else 0.010).joined_saves_s(30) == pytest.approx(0.010)


def test_sizes_of_one_octave_are_told_apart() -> None:
    assert learnt(lambda tokens: 0.001 * tokens, sizes=(31, 32)).joined_saves_s(32) == 0.0
    assert learnt(lambda tokens: 0.001 * tokens, sizes=(15, 31, 32)).joined_saves_s(32) == pytest.approx(0.0, abs=1e-4)


def test_nothing_before_steps_of_about_all_and_of_about_half_were_seen() -> None:
    assert StepCost().joined_saves_s(4) == 0.0
    assert learnt(lambda tokens: 0.030, sizes=(20,)).joined_saves_s(20) == 0.0
    assert learnt(lambda tokens: 0.030, sizes=(10,)).joined_saves_s(20) == 0.0
    assert learnt(lambda tokens: 0.030, sizes=(10, 20)).joined_saves_s(20) == pytest.approx(0.030)
