"""`Usage`, the token counts of a request, their sum over choices, and advice for requests without draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PLAIN_ADVICE = {
    "off": "K is 0 or speculation off, for this request or as the server's default; or the server has no drafter: "
    "start it with --draft MODEL or --drafter auto",
    "end": "the answer was too short for drafts",
    "no_draft": "no draft is connected; the drafters auto and ngram go on without",
    "busy": "no draft has a slot free; give drafts more slots, or add one",
    "none_parked": "no drafts were there in time; with num_draft_tokens=5 (-K 5) steps wait for them",
    "nothing": "the drafter had nothing to propose, as n-grams where no text repeats itself; the drafter model has",
    "does_not_pay": "K is auto, and drafts do not pay on this machine now: plain steps are as fast or faster; "
    "num_draft_tokens=5 (-K 5) drafts all the same",
    "refused": "what was drafted broke a rule of the protocol; the gateway's log names it",
}
"""For each value of `Usage.plain_reason`: a sentence on why plain steps had no draft tokens, and what to try."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token and step counts of one choice, or of all choices of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_rounds: int
    """Number of steps in which the target verified draft tokens of a choice, summed over the choices."""
    num_draft_tokens: int
    """Number of draft tokens that the target verified, accepted or not. Draft tokens that came too late to be verified
    are not counted."""
    num_accepted_tokens: int
    num_plain_steps: int
    """Number of steps in which the target continued a choice without draft tokens, summed over the choices."""
    num_wasted_tokens: int
    """Number of draft tokens that equal the output's tokens but arrived after the target's step that could have
    verified them."""
    seed: int
    """Seed of the request: the one in the request, or else the one that the gateway drew."""
    num_cached_prompt_tokens: int = 0
    """Number of prompt tokens found in the target's prefix cache. For several choices: the smallest of their counts."""
    lenience: float | None = None
    """Lenience of the acceptance rule if it was below 1; None = the output follows the target's distribution
    exactly."""
    num_accepted_prediction_tokens: int = 0
    """Number of output tokens that were draft tokens copied from the request's prediction."""
    num_rejected_prediction_tokens: int = 0
    """Number of tokens of the request's prediction, less `num_accepted_prediction_tokens`; at least 0."""
    plain_reason: str | None = None
    """Why most of the plain steps had no draft tokens, as a key of `PLAIN_ADVICE`; None = the target made no plain
    steps."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by `num_draft_tokens`, in [0, 1]; None = no draft token was verified."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted draft tokens divided by `num_rounds`, as vLLM defines it; None = no draft token was verified."""
        if not self.num_rounds:
            return None
        return 1 + self.num_accepted_tokens / self.num_rounds

    @property
    def mean_emitted_length(self) -> float | None:
        """Mean number of output tokens that a round added; None = no draft token was verified. Unlike
        `mean_accepted_length` it does not count draft tokens that were accepted after the end of the output.
        """
        if not self.num_rounds:
            return None
        num_emitted = self.num_completion_tokens - self.num_plain_steps
        return max(0, num_emitted) / self.num_rounds

    @property
    def tokens_per_target_pass(self) -> float | None:
        """Output tokens divided by the number of the target's steps (rounds and plain steps); None = no step yet."""
        num_steps = self.num_rounds + self.num_plain_steps
        if not num_steps:
            return None
        return self.num_completion_tokens / num_steps

    def describe(self) -> str:
        """Return a sentence on how many draft tokens were accepted or, if none was verified, on why and what to try."""
        if self.acceptance_rate is None or self.mean_accepted_length is None:
            advice = PLAIN_ADVICE.get(self.plain_reason or "")
            if not advice:
                return "nothing was drafted"
            return f"nothing was drafted: {advice}"
        accepted = f"acceptance rate {self.acceptance_rate:.2f} ({self.num_accepted_tokens}/{self.num_draft_tokens})"
        return f"{accepted}, mean accepted length {self.mean_accepted_length:.2f}"


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of all choices of one request, given the usage of each (at least one). The prompt's tokens count
    once; the choices share one seed.
    """
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
