"""`metrics.speculative_decoding` of an answer, in vLLM's form. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Step = tuple[int, int]
"""Draft tokens verified and accepted by a round that had some."""


def acceptance_of(steps: Sequence[Step], num_spec_tokens: int, detailed: bool) -> dict[str, Any]:
    """Return what rounds kept of their drafts; the bonus token is in none of the counts.

    num_spec_tokens: length of the longest draft that a step may have. Forced tokens of a grammar may go past it, which
    then makes the histogram longer: it has num_spec_tokens + 1 entries always.
    """
    drafted, accepted = sum(step[0] for step in steps), sum(step[1] for step in steps)
    num_spec_tokens = max([num_spec_tokens, *(step[1] for step in steps)])
    counts = Counter(steps)
    by_length: dict[str, list[int]] = {}
    for (length, kept), count in sorted(counts.items()):
        by_length.setdefault(str(length), [0] * (length + 1))[kept] = count
    kept_counts = Counter(kept for _, kept in steps)
    told = {
        "mean_acceptance_length": 1.0 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [kept_counts[kept] for kept in range(num_spec_tokens + 1)],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if detailed:
        told["per_step_accepted"] = [step[1] for step in steps]
        told["per_step_drafted"] = [step[0] for step in steps]
    return told
