"""Conversion of the prompts, chats and options that a user gives to `LLM` into arguments of `AsyncClient.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from outrider.client.generate_options import GenerateOptions, Message
from outrider.wire.errors import InvalidRequest

Request = tuple[str | None, GenerateOptions]
"""Arguments of one `AsyncClient.generate` call: (prompt text, options). The text is None if the options hold the prompt
as token ids or as a chat."""
Sampling = GenerateOptions | Sequence[GenerateOptions]
"""`GenerateOptions` for all prompts, or a list with one `GenerateOptions` per prompt."""


def read_prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[Request]:
    """Return one request per prompt, in the order of the prompts. `prompts` is one text, one list of token ids, or a
    list of texts and lists of token ids; anything else raises InvalidRequest.
    """
    if not isinstance(prompts, str) and not _is_list(prompts):
        raise InvalidRequest(
            f"prompts is {repr(prompts)[:100]}, must be a text, a list of token ids, or a list of such", param="prompts"
        )
    if isinstance(prompts, str) or _are_token_ids(prompts):
        return [_read_prompt(prompts)]
    return [_read_prompt(prompt) for prompt in prompts]


def read_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Request]:
    """Return one request per chat. `messages` is a list of chats if it is a list of lists, and one chat otherwise. The
    messages themselves are checked later, when the request is built.
    """
    if _is_list(messages) and all(map(_is_list, messages)):
        chats: Sequence[Any] = messages
    else:
        chats = [messages]
    return [(None, GenerateOptions(messages=chat)) for chat in chats]


def read_sampling(sampling: Any, num_prompts: int) -> list[Any]:
    """Return a list with the options of each prompt. `sampling` is one set of options for all, a list with one set per
    prompt, or None for no options; anything else raises InvalidRequest.
    """
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
    """Return the largest number of choices (`n`) of any request, at least 1. An `n` that is not a whole number does not
    count; it raises its error later, when the request is built.
    """
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
