"""Responses, events and errors of Anthropic's /v1/messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gateway.api.schemas.answers.base import AnswerModel
from gateway.api.schemas.answers.speculation import ChoiceSpeculation
from gateway.api.schemas.answers.usage import SpeculationUsage


class TokenCount(AnswerModel):
    input_tokens: int


class MessageUsage(AnswerModel):
    input_tokens: int = Field(description="Those that were not cached.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    speculation: SpeculationUsage | None = Field(default=None, description="At the end.")


class TextBlock(AnswerModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(AnswerModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageAnswer(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds.")


class MessageEvent(BaseModel):
    """An event of Anthropic's stream. Each type has further fields of its own."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    speculation: ChoiceSpeculation | None = Field(
        default=None, description="With speculation.token_kinds or explain: in a round's first event."
    )


class MessageErrorFields(AnswerModel):
    type: str
    message: str
    details: dict[str, Any] = Field(default={})


class MessageError(AnswerModel):
    type: Literal["error"]
    error: MessageErrorFields
