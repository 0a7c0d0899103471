"""Counts of n-grams, held against counting anew at every token."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.ngram import Ngram
from tests.unit.outrider.drafting.drafting import Course, as_dict, check_a_course, courses, ids, said


def counted(tokens: list[int], orders: tuple[int, ...], history: int, guesses: list[int]) -> dict[int, float] | None:
    """What followed the longest of the last tokens, guesses among them, that was followed by anything within the last
    `history` tokens.
    """
    window = tokens[-history:]
    for order in sorted(orders, reverse=True):
        tail, found = [*window, *guesses][len(window) + len(guesses) - order + 1 :], Counter[int]()
        if len(window) + len(guesses) < order - 1:
            continue
        for at in range(len(window) - order + 1):
            if window[at : at + order - 1] == tail:
                found[window[at + order - 1]] += 1
        if found:
            return {token_id: float(number) for token_id, number in found.items()}
    return None


@pytest.mark.parametrize("orders", [(2, 3, 4), (2,), (4,), (3, 2)])
@pytest.mark.parametrize("history", [5, 40, 512])
def test_ngrams_are_those_of_the_last_tokens(orders: tuple[int, ...], history: int) -> None:
    dice = random.Random(f"{orders} {history}")
    prompt = [dice.randrange(4) for _ in range(dice.randrange(60))]
    follower, tokens = Ngram(orders, history).open(prompt, len(prompt)), list(prompt)
    for _ in range(100):
        walk, guesses = follower.walk(), list[int]()
        for _ in range(4):
            assert as_dict(walk.next()) == counted(tokens, orders, history, guesses)
            guesses.append(dice.randrange(4))
            walk.step(guesses[-1])
        tokens.append(dice.randrange(4))
        follower.append(tokens[-1:])


@given(
    prompt=ids, course=courses, history=st.sampled_from((5, 9, 512)), orders=st.sampled_from(((2, 3, 4), (3,), (2,)))
)
@settings(max_examples=60)
def test_it_proposes_what_a_fresh_one_proposes(
    prompt: list[int], course: Course, history: int, orders: tuple[int, ...]
) -> None:
    check_a_course(lambda: Ngram(orders, history), prompt, course)


def test_a_repeated_text_is_drafted_whole() -> None:
    follower, text = Ngram().open([1, 2, 3, 4, 5] * 3, 15), [1, 2, 3, 4, 5] * 4
    for token_id, following in pairwise(text):
        assert set(said(follower) or ()) == {token_id}  # nothing else may follow
        walk = follower.walk()
        walk.step(token_id)
        assert set(as_dict(walk.next()) or ()) == {following}
        follower.append([token_id])


def test_two_sequences_share_nothing() -> None:
    drafter = Ngram()
    one, other = drafter.open([1, 2, 1, 2, 1], 5), drafter.open([1, 3, 1, 3, 1], 5)
    assert said(one) == {2: 1} and said(other) == {3: 1}  # trigrams: (2, 1) and (3, 1)


def test_one_token_alone_is_not_worth_more_than_a_model() -> None:
    follower = Ngram().open([1, 2, 3, 1], 4)
    assert said(follower) == {2: 1} and not follower.has_next()
    follower.append([2])
    assert said(follower) == {3: 1} and follower.has_next()
    assert Ngram(orders=(2,)).open([1, 2, 3, 1], 4).has_next()
