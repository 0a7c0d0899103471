"""From which length drafts pay."""

from __future__ import annotations

import math

import pytest

from outrider.lab.tuning.latency import Latency, break_even


@pytest.mark.parametrize(
    ("drafted", "tokens"),
    [
        (Latency(0.5, 1.0, 0.125), 1),  # as soon, and faster
        (Latency(0.875, 1.0, 0.125), 4),  # 3/8 s later, and 1/8 s faster for each of 3 further ones
        (Latency(1.0, 3.0, 0.125), 3),  # with the first two of them
        (Latency(1.0, 8.0, 0.125), 3),  # plain decoding has three by then, and would have more before the eighth
        (Latency(0.25, 8.0, 0.125), 1),  # sooner from the first on
        (Latency(0.25, 1.0, 0.25), None),
        (Latency(0.5, 1.0, math.nan), None),
    ],
)
def test_drafts_pay_from_the_length_that_makes_good_their_first_token(drafted: Latency, tokens: int | None) -> None:
    plain = Latency(0.5, 1.0, 0.25)
    assert break_even(plain, drafted) == tokens
    if tokens is not None:
        assert drafted.answer_s(tokens) <= plain.answer_s(tokens)
