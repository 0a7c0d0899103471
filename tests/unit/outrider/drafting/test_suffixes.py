"""The longest match of the last tokens."""

import random

import pytest

from outrider.drafting.lookup import Lookup
from outrider.drafting.suffixes import MAX_OCCURRENCES
from tests.unit.outrider.drafting.drafting import said
from tests.unit.outrider.drafting.longest import copied

SIZES = ((1, 1), (2, 4), (3, 8))


@pytest.mark.parametrize(("min_n", "max_n"), SIZES)
def test_the_longest_match_is_copied_and_the_latest_of_equals(min_n: int, max_n: int) -> None:
    dice = random.Random(f"{min_n} {max_n}")
    tokens: list[int] = []
    follower = Lookup(min_n, max_n).open([], 0)
    for _ in range(MAX_OCCURRENCES):  # so that none of them is one too many
        expected = copied([tokens], min_n, max_n)
        assert said(follower) == (None if expected is None else {expected: 1.0})
        tokens.append(dice.randrange(3))
        follower.append(tokens[-1:])
