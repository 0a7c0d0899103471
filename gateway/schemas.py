"""The bodies of /v1/completions and /v1/chat/completions, checked and translated to a `Demand`.

docs/openai.md lists every parameter; a test holds the two together.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict

from gateway.generation import AcceptanceRule, SpeculationOptions
from gateway.parameters import (
    IGNORED,
    NEUTRAL,
    biases_by_id,
    draft_logprobs_of,
    or_else,
    prompts,
    string_or_strings,
    text_of,
    unsigned_seed,
)
from gateway.requests import MAX_MESSAGES, MAX_STOPS, Chat, Demand, FieldNames
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import DRAFTERS
from outrider.wire.params import (
    AUTO,
    MAX_BAD_WORDS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from outrider.wire.tree_shape import TreeShape

DEFAULT_MAX_TOKENS = 16
MAX_FIELDS = 64
"""Of a JSON object that is no map; more than any has."""

Strings = Annotated[list[str], BeforeValidator(string_or_strings, json_schema_input_type=str | list[str])]
Prompts = Annotated[
    list[Any], BeforeValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class _Strict(BaseModel):
    """Unknown names are refused, and nothing is converted: "0.5" is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """pydantic makes an error of each unknown name, which takes seconds for those of a large body."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields, at most {MAX_FIELDS} are allowed")
        return value


def _draft_tokens(value: Any) -> Any:
    if value != AUTO and value is not None and type(value) is not int:
        raise ValueError(f"must be a whole number from 0 to {MAX_DRAFT_TOKENS}, or auto")
    return value


class SpeculationBody(_Strict):
    enabled: bool | None = None
    num_draft_tokens: Annotated[
        Any, BeforeValidator(_draft_tokens, json_schema_input_type=int | Literal["auto"] | None)
    ] = None
    draft_logprobs: str | None = None
    """auto, full, topk or topk:N."""
    acceptance: Literal["rejection", "coupled"] | None = None
    lenience: float | None = None
    drafter: Literal["model", "ngram", "lookup", "unigram", "bigram", "ngram+model", "lookup+model"] | None = None
    tree: str | None = None
    """Children by depth, 4x2x1, or best:NODESxDEPTH."""

    def options(self) -> SpeculationOptions:
        kind, topk = draft_logprobs_of(self.draft_logprobs)
        enabled = True if self.enabled is None else self.enabled
        rule = None if self.acceptance is None else AcceptanceRule[self.acceptance.upper()]
        drafter = None if self.drafter is None else DRAFTERS[self.drafter]
        tree = None if self.tree is None else TreeShape.parse(self.tree, "speculation.tree")
        adaptive = self.num_draft_tokens == AUTO
        count = None if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens
        return SpeculationOptions(enabled, count, kind, topk, rule, self.lenience, drafter, tree, adaptive)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and ignored: padding against traffic analysis."""


class MessageBody(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[TextPart])]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        """Answers are sent back with all their empty fields, such as `tool_calls: null`."""
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name in cls.model_fields or each not in (None, [])}


class _Body(_Strict):
    """What both endpoints take. null stands for the default everywhere."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    bad_words: Annotated[Strings, Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: int | None = None
    stop: Annotated[Strings, Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    """OpenAI's newer name for user."""

    def include_usage(self) -> bool:
        """Raises InvalidRequest when stream_options come without stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, num_logprobs: int | None) -> SamplingParams:
        """All but max_tokens, seed, choice and bad words. Ranges are checked with the model's own."""
        top_k = self.top_k or 0
        return SamplingParams(
            temperature=or_else(self.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,  # vLLM's way to say off
            top_p=or_else(self.top_p, 1.0),
            min_p=or_else(self.min_p, 0.0),
            repetition_penalty=or_else(self.repetition_penalty, 1.0),
            presence_penalty=or_else(self.presence_penalty, 0.0),
            frequency_penalty=or_else(self.frequency_penalty, 0.0),
            logit_bias=biases_by_id(self.logit_bias or {}),
            min_tokens=or_else(self.min_tokens, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=num_logprobs,
        )

    def common(self) -> dict[str, Any]:
        """The fields of Demand that need no more than this."""
        return {
            "model": self.model or "",
            "num_choices": or_else(self.n, 1),
            "seed": unsigned_seed(self.seed),
            "stop": tuple(self.stop or ()),
            "bad_words": tuple(self.bad_words or ()),
            "speculation": SpeculationOptions() if self.speculation is None else self.speculation.options(),
            "cache_salt": self.cache_salt,
            "user": self.user or self.safety_identifier or None,
        }


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def demand(self, request_id: str) -> Demand:
        if self.best_of is not None and self.best_of != or_else(self.n, 1):
            raise InvalidRequest(
                f"best_of is {self.best_of} and n is {or_else(self.n, 1)}; only best_of equal to n is offered",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not offered: prompts get no log-probs here", param="echo")
        return Demand(
            request_id=request_id,
            prompts=tuple(self.prompt),
            names=FieldNames(prompt="prompt"),
            params=self.sampling(self.logprobs),
            max_tokens=or_else(self.max_tokens, DEFAULT_MAX_TOKENS),
            **self.common(),
        )


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def demand(self, request_id: str) -> Demand:
        messages = tuple(message.model_dump(exclude_none=True) for message in self.messages)
        name, max_tokens = self._max_tokens()
        chat = Chat(messages, or_else(self.add_generation_prompt, True), self.chat_template_kwargs or {})
        return Demand(
            request_id=request_id,
            prompts=(chat,),
            names=FieldNames(prompt="messages", max_tokens=name, num_logprobs="top_logprobs"),
            params=self.sampling(self._num_logprobs()),
            max_tokens=max_tokens,
            **self.common(),
        )

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return or_else(self.top_logprobs, 0)
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None

    def _max_tokens(self) -> tuple[str, int | None]:
        """(the name that was used, the value)."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest(
                f"max_tokens is {old} and max_completion_tokens is {new}; give one of them", param="max_tokens"
            )
        return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_body(cls: type[Body], data: dict[str, Any]) -> Body:
    """Raises InvalidRequest naming the first parameter that is unknown, not offered or of the wrong type."""
    wanted: dict[str, Any] = {}
    for name, value in data.items():
        if name in NEUTRAL and name not in cls.model_fields:
            if value is not None and value not in NEUTRAL[name]:
                raise InvalidRequest(f"{name} is not offered by this server; leave it out", param=name)
        elif name in cls.model_fields:
            wanted[name] = value
        elif name not in IGNORED:  # here, as pydantic would make an error of each such name
            raise _unknown(name)
    try:
        return cls.model_validate(wanted)
    except ValidationError as error:
        raise _invalid(error) from None


def _unknown(param: str) -> InvalidRequest:
    return InvalidRequest(f"unknown parameter {param}; docs/openai.md lists those offered", param=param)


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f"{'.' if param else ''}{part}"
    if first["type"] == "extra_forbidden":
        return _unknown(param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = first.get("ctx", {}).get("error", first["msg"])
    if first["type"] == "model_type":
        message = "must be an object" + (', such as {"enabled": false}' if param == "speculation" else "")
    return InvalidRequest(f"{param} is {reprlib.repr(first['input'])}: {message}", param=param)
