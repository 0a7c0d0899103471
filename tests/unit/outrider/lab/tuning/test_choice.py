"""Which of several measured settings is recommended."""

import pytest

from outrider.lab.tuning.choice import choose, fastest_drafted


def test_a_tie_goes_to_what_is_simpler() -> None:
    speeds = {"plain": [10, 10, 10], "K = 2": [19.9, 21, 20], "K = 4": [20, 20.5, 20.2]}
    choice = choose(speeds)
    assert (choice.name, choice.fastest) == ("K = 2", "K = 4")


@pytest.mark.parametrize("speeds", [[19.9, 20.4, 20.1], [18, 21, 19]], ids=["never ahead", "too far behind"])
def test_what_is_slower_beyond_noise_is_not_a_tie(speeds: list[float]) -> None:
    assert choose({"plain": [10, 10, 10], "K = 2": speeds, "K = 4": [20, 20.5, 20.2]}).name == "K = 4"


def test_no_drafts_where_they_do_not_pay() -> None:
    worse = choose({"plain": [10, 10, 10], "K = 2": [9, 9.5, 9], "K = 4": [7, 7, 7]})
    assert worse.name == worse.fastest == "plain" and worse.speedup.median == 1.0
    same = choose({"plain": [10, 10, 10], "K = 2": [10.1, 9.9, 10.2]})
    assert (same.name, same.fastest) == ("plain", "K = 2")
    assert fastest_drafted({"plain": [10], "K = 2": [9.5], "K = 4": [7]}) == "K = 2"
