"""What a response says it used, summed by hand."""

from collections import Counter

from gateway.api.usage import acceptance_of, usage_of
from gateway.generation import ChoiceUsage


def test_a_prompt_counts_once_and_choices_add_up() -> None:
    def choice(num_prompt: int, num_cached: int, seed: int) -> ChoiceUsage:
        """6 tokens of 2 rounds, with 3 of 5 draft tokens, and of a plain step."""
        counts = {"num_completion_tokens": 6, "num_rounds": 2, "num_plain_steps": 1, "seed": seed}
        drafts = {"num_draft_tokens": 5, "num_accepted_tokens": 3, "plain_reasons": Counter(busy=1)}
        return ChoiceUsage(num_prompt, num_cached_prompt_tokens=num_cached, **counts, **drafts)  # type: ignore[arg-type]

    usage = usage_of([choice(10, 8, 1), choice(10, 4, 2), choice(7, 0, 1), choice(7, 3, 2)], 2, 9)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (17, 24, 41)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 9
    speculation = usage["speculation"]
    assert (speculation["num_rounds"], speculation["acceptance_rate"]) == (8, 12 / 20)
    assert (speculation["mean_accepted_length"], speculation["mean_emitted_length"]) == (1 + 12 / 8, 20 / 8)
    assert (speculation["seed"], speculation["seeds"], speculation["plain_reason"]) == (None, [1, 1], "busy")


def test_rates_of_nothing_are_none() -> None:
    speculation = usage_of([ChoiceUsage(3, seed=5)], 1)["speculation"]
    rates = ("acceptance_rate", "mean_accepted_length", "mean_emitted_length", "plain_reason")
    assert [speculation[name] for name in rates] == [None] * 4
    assert speculation["seed"] == 5


def test_steps_are_counted_by_what_was_drafted_and_accepted() -> None:
    metrics = acceptance_of([(3, 3), (3, 1), (1, 0)], 2, detailed=True)
    assert metrics == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [1, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"1": [1, 0], "3": [0, 1, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 7,
        "num_spec_tokens": 3,
        "per_step_accepted": [3, 1, 0],
        "per_step_drafted": [3, 3, 1],
    }
    none = acceptance_of([], 2, detailed=False)
    assert (none["mean_acceptance_length"], none["draft_acceptance_rate"]) == (1.0, 0.0)
    assert none["acceptance_histogram"] == [0, 0, 0] and "per_step_accepted" not in none
