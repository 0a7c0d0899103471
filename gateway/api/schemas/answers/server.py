"""Responses about the server: models, readiness, addresses of metrics, tokenizers, and errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from gateway.api.schemas.answers.base import AnswerModel


class Model(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    draft: str | None
    drafter: str | None
    """Drafter for requests that name none; null if such requests run without drafts."""
    drafters: list[str]
    """Drafters that a request may name."""
    text_only: bool
    """Whether the checkpoint also has parts for images, video or sound, which this server does not load."""
    chat_template: Literal["turns", "plain"] | None
    """Kind of the chat template. turns: it writes the role of each message. plain: it writes only the texts. null:
    there is no template."""
    sampling_defaults: dict[str, float]
    """The checkpoint's values of sampling parameters, used for requests that do not set them."""
    type: Literal["model"]
    """Always "model". Only Anthropic's clients read this field, `display_name` and `created_at`."""
    display_name: str
    created_at: str
    """The field `created` (seconds since 1970) in ISO 8601."""


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[Model]


class Alive(AnswerModel):
    alive: bool


class Ready(AnswerModel):
    ready: bool
    reason: str | None
    refused: list[str]
    """For each worker that the gateway refuses, or that ended and is not started again: a sentence with the reason."""


class TargetGroup(AnswerModel):
    targets: list[str]
    labels: dict[str, str]


class ErrorFields(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerModel):
    error: ErrorFields


class Tokenized(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class TokenizerInfo(BaseModel):
    """Response of /tokenizer_info. Each further special token of the tokenizer is a field with the token's name."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Detokenized(AnswerModel):
    prompt: str


class Version(AnswerModel):
    version: str
