"""What `benchmarks.default` makes of the seconds that units took."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.default import DEFAULT, PLAIN, Cell, find_slow, mean_over_best


def cell_of(text: str, **seconds: list[float]) -> Cell:
    return Cell("demo", 0.0, 8, text, list(seconds), 48, seconds)


FAST = cell_of("code", plain=[2.0, 4.0], ngram=[1.0, 2.0], default=[1.0, 2.0])
SLOW = cell_of("prose", plain=[1.0, 1.0], ngram=[1.5, 1.5], default=[2.0, 1.0])


def test_a_ratio_is_of_units_and_the_best_arm_is_never_the_default() -> None:
    assert FAST.rate(PLAIN) == 8 * 48 / 3.0
    assert (FAST.best, SLOW.best) == ("ngram", PLAIN)
    assert FAST.over(PLAIN).middle == pytest.approx(2.0)
    assert SLOW.over(PLAIN).middle == pytest.approx(0.5**0.5)
    assert (SLOW.over(PLAIN).low, SLOW.over(PLAIN).high) == pytest.approx((0.5, 1.0))
    assert mean_over_best([FAST, SLOW]) == pytest.approx(0.5**0.25)


def test_a_cell_is_slow_where_its_upper_bound_is() -> None:
    """The units of SLOW differ so much that nothing is sure of it."""
    behind = cell_of("chat", plain=[1.0, 1.0], ngram=[0.5, 0.5], default=[1.1, 1.1])
    assert find_slow([FAST]) == []
    assert find_slow([FAST, SLOW, behind]) == [
        "0.685 of the best arms over all cells, 0.95 wanted",
        "demo, T = 0, 8 at once, chat: 0.455 (0.455-0.455) of ngram, an upper bound of 0.9 wanted",
        "demo, T = 0, 8 at once, chat: 0.909 (0.909-0.909) of plain, an upper bound of 0.97 wanted",
    ]


def test_steps_are_shares_of_all_steps() -> None:
    cell = Cell("demo", 0.0, 1, "code", [DEFAULT], 48, steps=Counter({"plain: nothing": 1, "ngram": 3}))
    assert cell.drafted == "ngram 75%, plain: nothing 25%"
