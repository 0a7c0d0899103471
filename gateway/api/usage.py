"""Writes a response's `usage`, and its `metrics.speculative_decoding` in vLLM's form, as plain dicts. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gateway.generation import ChoiceUsage, most_common_reason

Json = dict[str, Any]

Step = tuple[int, int]
"""(number of draft tokens that a step verified, number of these that it accepted)."""


def usage_so_far(num_prompt_tokens: int, num_tokens: int) -> Json:
    """Return the field `usage`, in vLLM's form, for a running choice that has `num_tokens` output tokens so far."""
    total = num_prompt_tokens + num_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total}


def usage_of(usages: Sequence[ChoiceUsage], num_choices: int, num_reasoning_tokens: int = 0) -> Json:
    """Return the `usage` of a response: sums over its choices. The tokens of a prompt count once.

    usages: usage of all choices, `num_choices` consecutive ones for each prompt. Where the choices of a prompt differ
    in the number of its cached tokens, the smallest counts.
    """
    # 4 usages and num_choices 2: the first two are of prompt 0, the others of prompt 1
    num_prompt_tokens = 0
    num_cached_tokens = 0
    for first in range(0, len(usages), num_choices):
        of_prompt = usages[first : first + num_choices]
        num_prompt_tokens += of_prompt[0].num_prompt_tokens
        num_cached_tokens += min(usage.num_cached_prompt_tokens for usage in of_prompt)
    num_completion_tokens = _total(usages, "num_completion_tokens")
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": _total(usages, "num_accepted_prediction_tokens"),
            "rejected_prediction_tokens": _total(usages, "num_rejected_prediction_tokens"),
            "reasoning_tokens": num_reasoning_tokens,
            "audio_tokens": 0,
        },
        "speculation": _speculation(usages, num_choices),
    }


def _speculation(usages: Sequence[ChoiceUsage], num_choices: int) -> Json:
    num_rounds = _total(usages, "num_rounds")
    num_drafted = _total(usages, "num_draft_tokens")
    num_accepted = _total(usages, "num_accepted_tokens")
    acceptance_rate = None
    if num_drafted:
        acceptance_rate = num_accepted / num_drafted
    mean_accepted = None
    mean_emitted = None
    if num_rounds:
        mean_accepted = 1 + num_accepted / num_rounds
        mean_emitted = _total(usages, "num_emitted_tokens") / num_rounds
    seeds = [usage.seed for usage in usages[::num_choices]]
    return {
        "num_rounds": num_rounds,
        "num_plain_steps": _total(usages, "num_plain_steps"),
        "plain_reason": most_common_reason(usage.plain_reasons for usage in usages),
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "acceptance_rate": acceptance_rate,
        "mean_accepted_length": mean_accepted,
        "num_overrun_tokens": _total(usages, "num_overrun_tokens"),
        "mean_emitted_length": mean_emitted,
        "seed": _common_seed(usages),
        "seeds": seeds,
        "lenience": usages[0].lenience,
    }


def _total(usages: Sequence[ChoiceUsage], name: str) -> int:
    return sum(getattr(usage, name) for usage in usages)


def _common_seed(usages: Sequence[ChoiceUsage]) -> int | None:
    seeds = {usage.seed for usage in usages}
    if len(seeds) != 1:
        return None
    return seeds.pop()


def acceptance_of(steps: Sequence[Step], num_spec_tokens: int, detailed: bool) -> dict[str, Any]:
    """Return the metrics of steps that verified draft tokens. Bonus tokens are in none of the counts.

    num_spec_tokens: maximal number of draft tokens of a step, without those that a grammar forces. The histogram has an
    entry for each number of accepted tokens, from 0 to this maximum or to the largest number that occurred. detailed:
    whether the metrics also list every step.
    """
    # steps [(3, 3), (3, 1)] of at most 3: histogram [0, 1, 0, 1], by draft length {"3": [0, 1, 0, 1]}
    drafted_counts = [drafted for drafted, _ in steps]
    accepted_counts = [accepted for _, accepted in steps]
    num_drafted = sum(drafted_counts)
    num_accepted = sum(accepted_counts)
    num_spec_tokens = max([num_spec_tokens, *accepted_counts])
    mean_length = 1.0
    if steps:
        mean_length += num_accepted / len(steps)
    rate = 0.0
    if num_drafted:
        rate = num_accepted / num_drafted
    metrics = {
        "mean_acceptance_length": mean_length,
        "draft_acceptance_rate": rate,
        "acceptance_histogram": _histogram(accepted_counts, num_spec_tokens),
        "acceptance_histogram_by_draft_length": _histograms_by_length(steps),
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if detailed:
        metrics["per_step_accepted"] = accepted_counts
        metrics["per_step_drafted"] = drafted_counts
    return metrics


def _histogram(counts: Sequence[int], max_count: int) -> list[int]:
    histogram = [0] * (max_count + 1)
    for count in counts:
        histogram[count] += 1
    return histogram


def _histograms_by_length(steps: Sequence[Step]) -> dict[str, list[int]]:
    histograms: dict[str, list[int]] = {}
    for (drafted, accepted), num_steps in sorted(Counter(steps).items()):
        histogram = histograms.setdefault(str(drafted), [0] * (drafted + 1))
        histogram[accepted] = num_steps
    return histograms
