"""Responses and chunks of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.api.schemas.answers.base import AnswerModel
from gateway.api.schemas.answers.speculation import ChoiceSpeculation
from gateway.api.schemas.answers.usage import AnswerMetrics, UsageAnswer, UsageSoFar


class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null of a prompt's first token.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(AnswerModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description="tool_calls: of chats alone.")
    stop_reason: str | int | None
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds or explain.")


class _Whole(AnswerModel):
    id: str
    created: int
    model: str
    system_fingerprint: None


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int = Field(description="1 + how many tokens are likelier.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, log-probs by token id; null for the first token."""


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] = Field(default=[], description="With return_token_ids, as the next.")
    prompt_token_ids: list[int] = Field(default=[], description="In a choice's first chunk.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With prompt_logprobs.")


class Completion(_Whole):
    """A whole response of /v1/completions, or a chunk of its stream.

    In a chunk the `finish_reason` of a choice is null, unless it is the choice's last chunk.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | UsageSoFar | None = None
    metrics: AnswerMetrics | None = Field(default=None, description="Beside usage.")


class TokenLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerModel):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(AnswerModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(AnswerModel):
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
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With prompt_logprobs.")
    usage: UsageAnswer
    metrics: AnswerMetrics


class CalledFunctionDelta(AnswerModel):
    name: str = Field(default="", description="In a call's first delta.")
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(AnswerModel):
    index: int
    id: str = Field(default="", description="In a call's first delta.")
    type: Literal["function"] = Field(default="function", description="In a call's first delta.")
    function: CalledFunctionDelta


class Delta(AnswerModel):
    role: Literal["assistant"] = Field(default="assistant", description="In a choice's first chunk.")
    content: str = Field(default="", description="Where there is some.")
    reasoning_content: str = Field(default="", description="Where there is some.")
    tool_calls: list[ToolCallDelta] = Field(default=[], description="Where there are some.")


class ChatChunkChoice(_Choice):
    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class ChatChunk(_Whole):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids; in the first chunk.")
    usage: UsageAnswer | UsageSoFar | None = Field(
        default=None,
        description="With stream_options.include_usage; in the last chunk, and with continuous_usage_stats in each.",
    )
    metrics: AnswerMetrics | None = Field(default=None, description="In the last chunk, beside usage.")
