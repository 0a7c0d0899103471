"""The speed that is expected, against that of pairs whose speed is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.client import TokenKind
from outrider.lab.tuning.costs import Costs, costs_of
from outrider.lab.tuning.expected import Acceptance, expected_speed
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, moods, one_pass

EVERY_K = range(13)


def pair_texts(seed: int, count: int = 8) -> list[list[bool]]:
    draws = random.Random(seed)
    return [moods(draws) for _ in range(count)]


def costs_at(ks: Sequence[int], texts: list[list[bool]]) -> Costs:
    return costs_of({k: [one_pass(k, texts)] for k in ks}, MAX_TOKENS)


def test_acceptance_by_position_counts_what_was_looked_at() -> None:
    found = Acceptance.of({3: [one_pass(3, [[True, True, False, True, True, True, True, False, True]])]})
    # 1 1 0 | 1 1 1 + | 0 | 1 and the end, behind which nothing counts
    assert found.reached == (4, 2, 2)
    assert found.accepted == (3, 2, 1)
    assert found.alpha == pytest.approx(6 / 8)
    assert found.by_position == [3 / 4, 1.0, 1 / 2]
    assert found.answers[0][:7] == (TokenKind.ACCEPTED,) * 2 + (TokenKind.RECOVERED,) + (TokenKind.ACCEPTED,) * 3 + (
        TokenKind.BONUS,
    )
    assert found.chances()[0] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1 / 2, 0.0, 1.0]


def test_the_expected_speed_is_what_comes() -> None:
    """Costs from every K, drafts from the largest: the speed at each, on other text, within a few per cent."""
    costs = costs_at(EVERY_K, pair_texts(1))
    chances = Acceptance.of({12: [one_pass(12, pair_texts(2, 40))]}).chances()
    texts = pair_texts(3, 40)
    for k in range(13):
        measured = one_pass(k, texts).tokens_per_s
        assert expected_speed(chances, costs, k, MAX_TOKENS) == pytest.approx(measured, rel=0.06), k
