"""Copying a predicted text: from its beginning, on while the output agrees, and elsewhere after each kind of edit."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.prediction import MAX_N, Prediction, PredictionFollower
from tests.unit.outrider.drafting.drafting import AHEAD, Course, all_said, check_a_course, courses, ids, said

PROMPT = [900, 901]
TEXT = list(range(100, 160))
NEW = [500, 501, 502]


def opened(text: Sequence[int]) -> PredictionFollower:
    return Prediction(text).open(PROMPT, len(PROMPT))


def outcomes(text: Sequence[int], output: Sequence[int]) -> list[bool]:
    """Of what was said along an output, whether it came."""
    follower = opened(text)
    follower.append(output)
    return follower.outcomes(len(output))


def test_it_begins_with_the_output_and_copies_to_the_texts_end() -> None:
    follower = opened(TEXT)
    assert said(follower) == {TEXT[0]: 1} and follower.has_next()
    assert [next(iter(each or {})) for each in all_said(follower)] == TEXT[:AHEAD]
    assert outcomes(TEXT, TEXT) == [True] * len(TEXT)
    follower.append(TEXT)
    assert said(follower) is None and not follower.has_next()
    assert said(opened(())) is None


def test_a_token_of_another_drafter_ends_a_walk() -> None:
    walk = opened(TEXT).walk()
    walk.step(999)
    assert walk.next() is None


@pytest.mark.parametrize(
    ("output", "num_new", "num_edits"),
    [
        (TEXT[:20] + NEW + TEXT[23:], 3, 1),
        (TEXT[:20] + NEW + TEXT[20:], 3, 1),
        (TEXT[:20] + TEXT[30:], 0, 1),
        (TEXT[30:] + TEXT[:30], 0, 2),
        (NEW + TEXT, 3, 1),
        ([*TEXT[:20], 500, *TEXT[21:40], 500, *TEXT[41:]], 2, 2),
    ],
    ids=["replaced", "inserted", "deleted", "reordered", "begins otherwise", "renamed twice"],
)
def test_after_an_edit_it_goes_on_where_two_tokens_match(output: list[int], num_new: int, num_edits: int) -> None:
    """What the output adds cannot be predicted, nor the tokens that say where it goes on."""
    assert sum(outcomes(TEXT, output)) == len(output) - num_new - 2 * num_edits
    assert outcomes(TEXT, output).count(False) <= num_edits


def test_of_places_that_match_alike_the_next_one_is_taken() -> None:
    text = Prediction([1, 2, 9, 1, 2, 8, 3, 1, 2, 7])
    assert [text.longest([1, 2], near) for near in (0, 3, 6, 10)] == [(2, 2), (5, 2), (9, 2), (2, 2)]
    assert text.longest([3, 1, 2], 0) == (9, 3), "a longer match comes before"


@given(text=ids, tail=st.lists(st.integers(0, 3), min_size=1, max_size=MAX_N), near=st.integers(0, 12))
@settings(max_examples=200)
def test_the_longest_match_is_found_held_against_looking_at_all_places(
    text: list[int], tail: list[int], near: int
) -> None:
    found = list[tuple[int, int, int]]()
    for end in range(1, len(text)):
        length = next((n for n in range(min(end, len(tail)), 0, -1) if text[end - n : end] == tail[-n:]), 0)
        if length >= 2:
            found.append((-length, end if end >= near else end + len(text), end))
    best = min(found, default=None)
    assert Prediction(text).longest(tail, near) == (None if best is None else (best[2], -best[0]))


@given(text=ids, prompt=ids, course=courses)
@settings(max_examples=100)
def test_it_proposes_what_a_fresh_one_proposes(text: list[int], prompt: list[int], course: Course) -> None:
    check_a_course(lambda: Prediction(text), prompt, course)


@given(text=ids, output=ids)
@settings(max_examples=200)
def test_what_it_proposes_is_a_piece_of_the_text_and_outcomes_are_of_that(text: list[int], output: list[int]) -> None:
    follower = opened(text)
    for token_id in output:
        copied = [next(iter(each)) for each in all_said(follower) if each is not None]
        assert any(copied == text[start : start + len(copied)] for start in range(len(text) + 1))
        follower.append([token_id])
        assert follower.outcomes(1) == [token_id == first for first in copied[:1]]


def test_a_useless_prediction_proposes_nothing() -> None:
    """Random tokens, and a text in which every pair of the output's tokens comes somewhere."""
    dice = random.Random(1)
    for vocab, most in ((4000, 1), (12, 5)):
        text, output = ([dice.randrange(vocab) for _ in range(600)] for _ in range(2))
        assert len(outcomes(text, output)) <= most
    assert sum(outcomes(text, output + text)) > 500, "and it speaks again once it is of use"
