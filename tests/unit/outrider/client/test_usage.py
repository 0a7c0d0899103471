"""Counts of a request, their sum over choices, and what they say."""

from dataclasses import replace

import pytest

from outrider.client.usage import Usage, total_usage

SPENT = Usage(4, 7, 2, 5, 4, 1, 3, 9, num_cached_prompt_tokens=3, lenience=0.5, plain_reason="end")
NONE = Usage(4, 0, 0, 0, 0, 0, 0, 9)


def test_rates_follow_from_counts_and_are_none_without_them() -> None:
    assert (SPENT.acceptance_rate, SPENT.mean_accepted_length) == (0.8, 3.0)
    assert (SPENT.mean_emitted_length, SPENT.tokens_per_target_pass) == (3.0, 7 / 3)
    assert (NONE.acceptance_rate, NONE.mean_accepted_length) == (None, None)
    assert (NONE.mean_emitted_length, NONE.tokens_per_target_pass) == (None, None)
    assert replace(SPENT, num_completion_tokens=0).mean_emitted_length == 0


def test_choices_share_a_prompt_and_a_seed() -> None:
    other = Usage(4, 10, 1, 2, 1, 8, 0, 9, num_cached_prompt_tokens=2, lenience=0.5, plain_reason="busy")
    total = total_usage([SPENT, other])
    assert total == Usage(4, 17, 3, 7, 5, 9, 3, 9, num_cached_prompt_tokens=2, lenience=0.5, plain_reason="busy")
    assert total_usage([other, SPENT]) == total and total_usage([SPENT]) == SPENT


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (SPENT, "acceptance rate 0.80 (4/5), mean accepted length 3.00"),
        (replace(NONE, plain_reason="end"), "nothing was drafted: the answer was too short for drafts"),
        (replace(NONE, plain_reason="of a newer gateway"), "nothing was drafted"),
        (NONE, "nothing was drafted"),
    ],
)
def test_usage_shows_accepted_drafts_or_why_there_were_none(usage: Usage, said: str) -> None:
    assert usage.describe() == said
