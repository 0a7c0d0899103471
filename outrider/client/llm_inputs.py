"""Prompts, chats and options as `LLM` takes them, read into the arguments of `AsyncClient.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from outrider.client.options import GenerateOptions, Message
from outrider.wire.errors import InvalidRequest

Request = tuple[str | None, GenerateOptions]
"""Arguments of one call: the prompt's text, or None where the options hold token ids or a chat; and the options."""
Sampling = GenerateOptions | Sequence[GenerateOptions]
"""Options of all prompts, or a list with those of each prompt."""


def read_prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[Request]:
    """Return a request for each prompt, in their order. Raises InvalidRequest for what is no text and no list."""
    if not isinstance(prompts, str) and not _is_list(prompts):
        raise InvalidRequest(
            f"prompts is {repr(prompts)[:100]}, must be a text, a list of token ids, or a list of such", param="prompts"
        )
    if isinstance(prompts, str) or _are_token_ids(prompts):
        return [_read_prompt(prompts)]
    return [_read_prompt(prompt) for prompt in prompts]


def read_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Request]:
    """Return a request for each chat. Anything but a list of lists is taken for one chat: sending it checks it."""
    if _is_list(messages) and all(map(_is_list, messages)):
        chats: Sequence[Any] = messages
    else:
        chats = [messages]
    return [(None, GenerateOptions(messages=chat)) for chat in chats]


def read_sampling(sampling: Any, num_prompts: int) -> list[Any]:
    """Return the options of each prompt, given those of all or a list. Raises InvalidRequest."""
    if sampling is None:
        return [{}] * num_prompts
    if isinstance(sampling, Mapping):
        return [sampling] * num_prompts
    if not _is_list(sampling) or not all(isinstance(options, Mapping) for options in sampling):
        raise InvalidRequest(
            f'sampling is {repr(sampling)[:100]}, must be a dict such as {{"max_tokens": 16}}, or a list of such',
            param="sampling",
        )
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"sampling has {len(sampling)} entries for {num_prompts} prompts; give one for each, or one for all",
            param="sampling",
        )
    return list(sampling)


def max_choices(requests: Sequence[Request]) -> int:
    """Return the largest `n` of the requests, at least 1. An `n` that is no number is skipped: it is refused later."""
    largest = 1
    for _, options in requests:
        num_choices: Any = options.get("n")
        if isinstance(num_choices, Integral):
            largest = max(largest, int(num_choices))
    return largest


def _read_prompt(prompt: Any) -> Request:
    if isinstance(prompt, str):
        return prompt, GenerateOptions()
    if not _is_list(prompt):
        raise InvalidRequest(
            f"prompts holds {repr(prompt)[:100]}, must hold texts or lists of token ids", param="prompts"
        )
    return None, GenerateOptions(prompt_ids=prompt)


def _are_token_ids(prompts: Sequence[Any]) -> bool:
    return len(prompts) > 0 and all(isinstance(prompt, int) for prompt in prompts)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
