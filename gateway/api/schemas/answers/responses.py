"""Responses and events of OpenAI's /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gateway.api.schemas.answers.base import AnswerModel
from gateway.api.schemas.answers.openai import ContentLogprob
from gateway.api.schemas.answers.speculation import ChoiceSpeculation
from gateway.api.schemas.answers.usage import SpeculationUsage


class InputTokens(AnswerModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputTokensDetails(AnswerModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculation: SpeculationUsage


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ContentLogprob]


class ReasoningText(AnswerModel):
    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(AnswerModel):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(AnswerModel):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[str]
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(AnswerModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ResponseError(AnswerModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class Response(AnswerModel):
    """A response of /v1/responses. It repeats fields of the request, with the values that the server used."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds.")


class ResponseEvent(BaseModel):
    """An event of OpenAI's stream. Each type has further fields of its own."""

    type: str = Field(pattern=r"^response\.")
    sequence_number: int
    speculation: ChoiceSpeculation | None = Field(
        default=None, description="With speculation.token_kinds or explain: in a round's first event."
    )
