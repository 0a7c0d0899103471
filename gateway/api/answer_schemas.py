"""The bodies of answers, for /openapi.json alone: `gateway.api.openai_responses` makes plain dicts of them, for speed.

A test holds the two together.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(_Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int
    audio_tokens: int


class SpeculationUsage(_Answer):
    num_rounds: int = Field(description="With drafts.")
    num_plain_steps: int = Field(description="Steps without drafts.")
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    seed: int | None
    seeds: list[int] = Field(description="Of each prompt.")
    lenience: float | None = Field(description="null = the answer has exactly the target's law.")


class UsageAnswer(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculation: SpeculationUsage


class UsageSoFar(_Answer):
    """Of one choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(_Answer):
    """vLLM's. Rounds are steps with drafts; the bonus token is in no count."""

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


class AnswerMetrics(_Answer):
    speculative_decoding: SpeculativeDecoding | None = Field(
        description="null with several answers, with beams, and where no drafts were asked for."
    )


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenOfKind(_Answer):
    id: int
    text: str
    kind: Literal["accepted", "recovered", "bonus", "plain", "forced", "predicted"]


class DraftToken(_Answer):
    id: int
    text: str
    parent: int = Field(description="Index of the draft token that it follows; -1 = the last committed token.")
    accepted: bool
    kind: Literal["drawn", "guess", "forced", "predicted"]


class NamedToken(_Answer):
    id: int
    text: str


class RankedToken(NamedToken):
    logprob: float


class Rejection(_Answer):
    parent: int = Field(description="Index of the last accepted draft token; -1 = none was.")
    token: NamedToken = Field(description="What the target said instead.")
    target: list[RankedToken] = Field(description="Its best there, at most 5, under the law that it draws from.")
    draft_law: list[RankedToken] | None = Field(description="The best of the law that the draft drew from, at most 5.")
    draft_guesses: list[NamedToken] | None = Field(description="Where nothing was drawn; at most 5.")


class RoundTimings(_Answer):
    total_us: int
    hold_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    other_us: int
    draft_us: int | None = Field(description="Of the draft's steps, beside all these; null = not known.")


class Round(_Answer):
    committed_len: int = Field(description="Tokens of prompt and output before it.")
    drafter: str | None = Field(description="null for a plain step.")
    num_drafted: int
    num_accepted: int
    batch_size: int
    draft: list[DraftToken] = Field(description="What was verified, parents before their children.")
    rejection: Rejection | None = Field(description="null where all was kept, and where the answer ended before.")
    timings: RoundTimings


class ChoiceSpeculation(_Answer):
    tokens: list[TokenOfKind]
    round: Round | None = Field(default=None, description="With speculation.explain, of a stream.")


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description="tool_calls: of chats alone.")
    stop_reason: str | int | None
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds or explain.")


class _Whole(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Whole):
    """Also a chunk of a stream; then `finish_reason` is null but in a choice's last one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | UsageSoFar | None = None
    metrics: AnswerMetrics | None = Field(default=None, description="Beside usage.")


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(_Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null beside tool_calls where there is no text.")
    reasoning_content: str = Field(
        default="", description="Where the chat template marks reasoning, and there is some."
    )
    tool_calls: list[ToolCall] = Field(default=[], description="Where there are some.")
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    metrics: AnswerMetrics


class CalledFunctionDelta(_Answer):
    name: str = Field(default="", description="In a call's first delta.")
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(_Answer):
    index: int
    id: str = Field(default="", description="In a call's first delta.")
    type: Literal["function"] = Field(default="function", description="In a call's first delta.")
    function: CalledFunctionDelta


class Delta(_Answer):
    role: Literal["assistant"] = Field(default="assistant", description="In a choice's first chunk.")
    content: str = Field(default="", description="Where there is some.")
    reasoning_content: str = Field(default="", description="Where there is some.")
    tool_calls: list[ToolCallDelta] = Field(default=[], description="Where there are some.")


class ChatChunkChoice(_Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(_Whole):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | UsageSoFar | None = Field(
        default=None,
        description="With stream_options.include_usage; in the last chunk, and with continuous_usage_stats in each.",
    )
    metrics: AnswerMetrics | None = Field(default=None, description="In the last chunk, beside usage.")


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    draft: str | None
    drafters: list[str]


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Alive(_Answer):
    alive: bool


class Ready(_Answer):
    ready: bool
    reason: str | None
    refused: list[str]
    """Workers that answer and are not used, and why."""


class TargetGroup(_Answer):
    targets: list[str]
    labels: dict[str, str]


class ErrorFields(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorFields
