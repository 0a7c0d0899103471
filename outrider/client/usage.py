"""Counts of a request: `Usage`, its sum over choices, and advice where nothing was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PLAIN_ADVICE = {
    "off": "K is 0 or speculation off, for this request or as the server's default; or the server has nobody to draft: "
    "start it with --draft MODEL or --drafter auto",
    "end": "the answer was too short for drafts",
    "no_draft": "no draft is connected; the drafters auto and ngram go on without",
    "busy": "no draft has a slot free; give drafts more slots, or add one",
    "none_parked": "no drafts were there in time; with num_draft_tokens=5 (-K 5) steps wait for them",
    "nothing": "the drafter had nothing to propose, as n-grams where no text repeats itself; the drafter model has",
    "does_not_pay": "K is auto, and drafts do not pay on this machine now: plain steps are as fast or faster; "
    "num_draft_tokens=5 (-K 5) drafts all the same",
    "refused": "what was drafted broke a rule of the protocol; the gateway's log says which",
}
"""By `Usage.plain_reason`: why nothing was drafted, and what to try."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one choice, or of all choices of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_rounds: int
    """Steps that verified at least one draft token."""
    num_draft_tokens: int
    """Draft tokens that were verified."""
    num_accepted_tokens: int
    num_plain_steps: int
    """Steps without draft tokens."""
    num_wasted_tokens: int
    """Draft tokens that matched the output but arrived after the step that they were for."""
    seed: int
    """The caller's seed, or the one that the gateway drew."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens found in the target's prefix cache; over several choices, the smallest of their counts."""
    lenience: float | None = None
    """None = the output follows the target's distribution exactly."""
    num_accepted_prediction_tokens: int = 0
    """Output tokens that were drafted from the request's prediction."""
    num_rejected_prediction_tokens: int = 0
    """Tokens of the prediction that are not in the output."""
    plain_reason: str | None = None
    """Why most of the plain steps had no draft tokens, a key of `PLAIN_ADVICE`; None without plain steps."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted, in [0, 1]; None when nothing was drafted."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted over rounds, as vLLM counts it; None when nothing was drafted."""
        if not self.num_rounds:
            return None
        return 1 + self.num_accepted_tokens / self.num_rounds

    @property
    def mean_emitted_length(self) -> float | None:
        """Output tokens of rounds over rounds: tokens accepted behind the end of the output do not count. None when
        nothing was drafted.
        """
        if not self.num_rounds:
            return None
        num_emitted = self.num_completion_tokens - self.num_plain_steps
        return max(0, num_emitted) / self.num_rounds

    @property
    def tokens_per_target_pass(self) -> float | None:
        """Output tokens over the target's steps (rounds and plain steps); None before the first."""
        num_steps = self.num_rounds + self.num_plain_steps
        if not num_steps:
            return None
        return self.num_completion_tokens / num_steps

    def describe(self) -> str:
        """Return a sentence on the draft tokens' acceptance, or on why nothing was drafted and what to try."""
        if self.acceptance_rate is None or self.mean_accepted_length is None:
            advice = PLAIN_ADVICE.get(self.plain_reason or "")
            if not advice:
                return "nothing was drafted"
            return f"nothing was drafted: {advice}"
        accepted = f"acceptance rate {self.acceptance_rate:.2f} ({self.num_accepted_tokens}/{self.num_draft_tokens})"
        return f"{accepted}, mean accepted length {self.mean_accepted_length:.2f}"


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum over the choices of one prompt, at least one. The prompt counts once; the seed is shared."""
    total = usages[0]
    for usage in usages[1:]:
        total = _add(total, usage)
    most_plain = max(usages, key=lambda usage: usage.num_plain_steps)
    return replace(total, plain_reason=most_plain.plain_reason)


def _add(total: Usage, usage: Usage) -> Usage:
    return replace(
        total,
        num_completion_tokens=total.num_completion_tokens + usage.num_completion_tokens,
        num_rounds=total.num_rounds + usage.num_rounds,
        num_draft_tokens=total.num_draft_tokens + usage.num_draft_tokens,
        num_accepted_tokens=total.num_accepted_tokens + usage.num_accepted_tokens,
        num_plain_steps=total.num_plain_steps + usage.num_plain_steps,
        num_wasted_tokens=total.num_wasted_tokens + usage.num_wasted_tokens,
        num_cached_prompt_tokens=min(total.num_cached_prompt_tokens, usage.num_cached_prompt_tokens),
        num_accepted_prediction_tokens=total.num_accepted_prediction_tokens + usage.num_accepted_prediction_tokens,
        num_rejected_prediction_tokens=total.num_rejected_prediction_tokens + usage.num_rejected_prediction_tokens,
    )
