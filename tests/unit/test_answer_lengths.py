"""How many tokens an answer is expected to have still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer_lengths import AnswerLengths


def test_before_any_has_ended_an_answer_is_as_long_as_it_may_be() -> None:
    assert AnswerLengths().remaining(10, 100) == pytest.approx(90.0)


def test_answers_that_stop_early_make_it_short() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.ended(5, stopped=True)
    assert lengths.remaining(0, 1000) < 60
    assert lengths.remaining(8, 1000) == pytest.approx(992.0), "none that came as far is known to stop"


def test_answers_that_were_cut_off_say_nothing_of_what_would_have_followed() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.ended(16, stopped=False)
    assert lengths.remaining(0, 1000) == pytest.approx(1000.0)


def test_of_those_that_came_as_far_the_share_that_stopped_there_counts() -> None:
    lengths = AnswerLengths()
    for index in range(400):
        lengths.ended(3 if index % 2 else 600, stopped=True)
    assert lengths.remaining(0, 600) == pytest.approx(300, rel=0.1)
    assert lengths.remaining(8, 600) > 400


@given(st.lists(st.tuples(st.integers(0, 10**8), st.booleans()), max_size=30), st.integers(0, 5000))
def test_between_nothing_and_what_is_left(answers: list[tuple[int, bool]], num_output: int) -> None:
    lengths = AnswerLengths()
    for num_tokens, stopped in answers:
        lengths.ended(num_tokens, stopped)
    assert 0.0 <= lengths.remaining(num_output, 5000) <= 5000 - num_output
