"""Parameters of OpenAI's API as they come, one by one: which ask for nothing here, and how odd forms are read."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

from gateway.generation import DraftLogprobs
from outrider.wire.errors import InvalidRequest

IGNORED = frozenset(("metadata", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store"))
"""Accepted by both endpoints, and changing nothing here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's and vLLM's parameters for what is not offered here, with the values (besides null) that ask for nothing."""


def string_or_strings(value: Any) -> Any:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError("must be a string or a list of strings")
    return values


def prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or a list, each text or token ids. `[]` and `[[]]` are refused later, as empty."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and type(value[0]) is not int:
        raise ValueError(f"has {len(value)} prompts, at most {MAX_PROMPTS} are read; split the request")
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return list(value)
    if isinstance(value, list) and all(type(each) is int for each in value):
        return [tuple(value)]
    lists = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if lists and all(type(token_id) is int for each in value for token_id in each):
        return [tuple(each) for each in value]
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def text_of(value: Any) -> str:
    """Parts are joined by newlines, as vLLM does."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        for part in value:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"has a part of type {part.get('type')!r}; only text parts are read here")
        return "\n".join(part["text"] for part in value)
    raise ValueError("must be a string or a list of text parts")


MAX_PROMPTS = 4096

Value = TypeVar("Value")


def or_else(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def unsigned_seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed: two's complement, 64 bits."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest(f"seed is {seed}, must fit 64 bits", param="seed")
    return seed % 2**64


MAX_DIGITS = 10
"""Of a token id or a size: those of 32 bits."""


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def biases_by_id(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not is_number(key):
            raise InvalidRequest(
                f"logit_bias has the key {reprlib.repr(key)}, must be a token id such as '50256'", param="logit_bias"
            )
    return {int(key): bias for key, bias in given.items()}


def draft_logprobs_of(text: str | None) -> tuple[DraftLogprobs | None, int | None]:
    """auto, full, topk or topk:N to (kind, N)."""
    if text is None:
        return None, None
    name, colon, size = text.partition(":")
    kinds = {kind.name.lower(): kind for kind in DraftLogprobs}
    sized = bool(colon)
    if name not in kinds or (sized and (name != "topk" or not is_number(size))):
        raise InvalidRequest(
            f"draft_logprobs is {reprlib.repr(text)}, must be auto, full, topk or topk:N",
            param="speculation.draft_logprobs",
        )
    return kinds[name], int(size) if sized else None
