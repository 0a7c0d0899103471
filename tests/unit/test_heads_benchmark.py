"""What `benchmarks.heads` counts: the share kept by position, given that all before it was, and differences of it."""

from __future__ import annotations

import pytest

from benchmarks.arms import Cell
from benchmarks.heads import acceptance, kept_at, more_at_first
from benchmarks.passes import Sample
from outrider.client import Round, RoundTimings

TIMINGS = RoundTimings(0.0, 0.0, 0.0, 0.0)


def sample(*rounds: tuple[int, int]) -> Sample:
    """Rounds of (drafted, kept)."""
    made = [Round("", 0, (), "", drafted, kept, TIMINGS) for drafted, kept in rounds]
    return Sample([[]], made, 1.0)


def test_a_position_counts_where_it_was_drafted_and_all_before_it_was_kept() -> None:
    answers = [sample((4, 2), (4, 0), (2, 2)), sample((0, 0), (1, 1))]
    assert kept_at(answers, 1) == [1.0, 0.0, 1.0, 1.0]
    assert kept_at(answers, 2) == [1.0, 1.0]
    assert kept_at(answers, 3) == [0.0]
    assert kept_at(answers, 4) == []


def test_shares_are_over_proposals_and_intervals_over_prompts() -> None:
    cell = Cell("", [[sample((2, 1), (2, 0))], [sample((2, 2))], [sample((0, 0))]])
    share = acceptance(cell, 1)
    assert share is not None and share.middle == pytest.approx(2 / 3)
    assert (share.low, share.high) == (0.5, 1.0)
    assert acceptance(cell, 3) is None


def test_first_tokens_are_compared_prompt_by_prompt() -> None:
    one = Cell("", [[sample((1, 1), (1, 1))], [sample((1, 1), (1, 0))], [sample((1, 1))]])
    other = Cell("", [[sample((1, 1), (1, 0))], [sample((1, 0))], [sample((0, 0))]])
    assert more_at_first(one, other).middle == pytest.approx(0.5)  # the third has nothing to compare with
