"""Expected tokens of a round by K, of a pair and of an answer."""

from __future__ import annotations

import random

import pytest

from gateway.acceptance_curve import FIRST_GUESS, MAX_PLANNED, PairAcceptance, SlotAcceptance


def observe(acceptance: PairAcceptance | SlotAcceptance, rates: list[float], times: int, seed: int = 0) -> None:
    """Rounds of as many tokens as there are rates."""
    dice = random.Random(seed)
    for _ in range(times):
        kept = 0
        while kept < len(rates) and dice.random() < rates[kept]:
            kept += 1
        acceptance.observe(len(rates), kept)


def test_a_pair_that_nothing_is_known_of_is_given_a_chance() -> None:
    assert list(PairAcceptance().rates()) == pytest.approx([FIRST_GUESS] * MAX_PLANNED)


def test_with_one_rate_the_expected_tokens_are_those_of_theorem_3_8() -> None:
    """(1 - alpha^(K + 1)) / (1 - alpha)."""
    pair = PairAcceptance()
    observe(pair, [0.7] * MAX_PLANNED, 4000)
    tokens = SlotAcceptance(pair).tokens()
    for k in (0, 1, 4, 8):
        assert tokens[k] == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3, rel=0.08)


def test_each_position_has_its_own_rate() -> None:
    pair = PairAcceptance()
    observe(pair, [0.9, 0.3, 0.9], 2000)
    assert list(pair.rates())[:3] == pytest.approx([0.9, 0.3, 0.9], abs=0.08)


def test_a_position_that_was_never_tried_is_taken_to_be_as_the_one_before() -> None:
    pair = PairAcceptance()
    observe(pair, [0.3, 0.3], 1000)
    assert list(pair.rates())[2:] == pytest.approx([pair.rates()[1]] * (MAX_PLANNED - 2))


def test_an_answer_has_the_pairs_rates_until_it_shows_its_own_and_again_after_a_while() -> None:
    pair = PairAcceptance()
    observe(pair, [0.8] * 4, 1000)
    usual = SlotAcceptance(pair).tokens()
    slot = SlotAcceptance(pair)
    observe(slot, [0.05] * 4, 40)
    assert slot.tokens()[4] < 1.8 < 3.0 < usual[4]
    for _ in range(400):
        slot.plain()
    assert slot.tokens() == pytest.approx(usual, rel=0.05)


def test_what_comes_after_a_while_counts_for_more_than_what_was() -> None:
    settled, faded = PairAcceptance(), PairAcceptance()
    for pair in (settled, faded):
        observe(pair, [0.0], 200)
    faded.fade()
    for pair in (settled, faded):
        observe(pair, [1.0], 8)
    assert settled.rates()[0] < 0.1 < 0.4 < faded.rates()[0]


def test_a_kind_of_sampling_begins_from_another() -> None:
    greedy = PairAcceptance()
    observe(greedy, [0.1], 500)
    assert PairAcceptance(like=greedy).rates()[0] == pytest.approx(greedy.rates()[0])
