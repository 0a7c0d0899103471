"""Answers about the server itself: models, readiness, metrics of workers, tokenizers, and errors."""

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
    """Drafter of requests that name none; null where the default is not to draft."""
    drafters: list[str]
    """Drafters that a request may name."""
    text_only: bool
    """Whether the checkpoint also has parts for images, video or sound, which are not loaded."""
    chat_template: Literal["turns", "plain"] | None
    """turns: the template marks the role of a message. plain: it writes the text alone. null: there is no template."""
    sampling_defaults: dict[str, float]
    """The checkpoint's values of sampling parameters, by name, for requests that do not give them."""
    type: Literal["model"]
    """For Anthropic's clients, as are `display_name` and `created_at`."""
    display_name: str
    created_at: str
    """The time of `created` as ISO 8601."""


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[Model]


class Alive(AnswerModel):
    alive: bool


class Ready(AnswerModel):
    ready: bool
    reason: str | None
    refused: list[str]
    """Workers that are not used, each with the reason: those that do not start again, and those that are refused."""


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
    """With the tokenizer's other special tokens, by their names."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Detokenized(AnswerModel):
    prompt: str


class Version(AnswerModel):
    version: str
