"""Numbers of tokens and of draft tokens, in the responses of all APIs."""

from __future__ import annotations

from pydantic import Field

from gateway.api.schemas.answers.base import AnswerModel


class PromptTokensDetails(AnswerModel):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(AnswerModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int
    audio_tokens: int


class SpeculationUsage(AnswerModel):
    num_rounds: int = Field(description="With drafts.")
    num_plain_steps: int = Field(description="Steps without drafts.")
    plain_reason: str | None = Field(description="Why most of those had none; null = there were none.")
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    num_overrun_tokens: int
    """Number of accepted draft tokens that are not in the output, because the output ended before them."""
    mean_emitted_length: float | None
    """Mean number of output tokens that a round added; null if there were no rounds."""
    seed: int | None
    seeds: list[int] = Field(description="Of each prompt.")
    lenience: float | None = Field(description="null = the output has exactly the target's distribution.")


class UsageAnswer(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculation: SpeculationUsage


class UsageSoFar(AnswerModel):
    """Usage of one choice so far, in a chunk of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(AnswerModel):
    """Metrics of a response's rounds, which are the steps with draft tokens. The fields are those of vLLM.

    Bonus tokens are in none of the counts.
    """

    mean_acceptance_length: float = Field(description="1 + accepted over rounds.")
    draft_acceptance_rate: float = Field(description="Accepted over drafted; 0 where nothing was drafted.")
    acceptance_histogram: list[int] = Field(
        description="Rounds that accepted 0, 1, ... draft tokens: num_spec_tokens + 1 entries."
    )
    acceptance_histogram_by_draft_length: dict[str, list[int]] = Field(
        description="The same for the rounds with so many draft tokens."
    )
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="Length of the longest draft that a step may have.")
    per_step_accepted: list[int] = Field(default=[], description="With speculation.metrics detailed, by round.")
    per_step_drafted: list[int] = Field(default=[], description="The same.")


class AnswerMetrics(AnswerModel):
    speculative_decoding: SpeculativeDecoding | None = Field(
        description="null with several answers, with beams, and where no drafts were asked for."
    )
