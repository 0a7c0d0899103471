"""Rewrites a chat's messages into the format that a template reads, and into other formats if it refuses them.

`templates.py` renders each result of `ways_of` until the template accepts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from gateway.confined.template_shape import (
    SYSTEM_ROLES,
    ArgumentsFormat,
    Message,
    TemplateShape,
    text_of_content,
)

ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
"""Roles that messages of every chat may have. A chat template may allow others, by naming them."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which templates look for its reasoning."""


def ways_of(messages: list[Message], source: str, shape: TemplateShape, merges: bool) -> Iterator[list[Message]]:
    """Yield rewritten copies of a chat's messages that a template may accept, the one closest to the original first.

    messages: the original, in which `content` is a text or a list of text parts and the arguments of calls are texts.
    source: source of the template. shape: forms of the messages' fields that the template reads. merges: whether later
    copies may also merge system messages and make roles alternate, for templates that refuse the other copies.
    """
    known = [_with_known_role(message, source) for message in messages]
    yield from _merged_ways(known, shape, merges)
    with_one_call = _one_call_a_message(known)
    if with_one_call != known:
        yield from _merged_ways(with_one_call, shape, merges)


def _merged_ways(messages: list[Message], shape: TemplateShape, merges: bool) -> Iterator[list[Message]]:
    yield from _written_ways(messages, shape)
    if not merges:
        return
    before = messages
    for change in (_merge_systems, _alternate, _system_in_user):
        after = change(before)
        if after != before:
            yield from _written_ways(after, shape)
        before = after


def _written_ways(messages: list[Message], shape: TemplateShape) -> Iterator[list[Message]]:
    without_reasoning = [_without_reasoning(message) for message in messages]
    for arguments_format in _formats_of_arguments(messages, shape):
        yield [_written(message, shape, arguments_format) for message in messages]
        if without_reasoning != messages:  # some templates refuse reasoning beside text and calls
            yield [_written(message, shape, arguments_format) for message in without_reasoning]


def _formats_of_arguments(messages: list[Message], shape: TemplateShape) -> Sequence[ArgumentsFormat]:
    for message in messages:
        if message.get("tool_calls"):
            return shape.arguments_formats()
    return (shape.arguments,)


def _with_known_role(message: Message, source: str) -> Message:
    if message["role"] == "developer" and "developer" not in source:
        return {**message, "role": "system"}
    return message


def _without_reasoning(message: Message) -> Message:
    if not message.get("tool_calls") or not message["content"]:
        return message
    fields = dict(message)
    fields.pop("reasoning_content", None)
    return fields


def _written(message: Message, shape: TemplateShape, arguments_format: ArgumentsFormat) -> Message:
    content = message["content"]
    calls = message.get("tool_calls")
    written = {**message, "content": _content(content, shape.contents.get(message["role"], "text"))}
    if calls:
        written["tool_calls"] = [_written_call(call, arguments_format) for call in calls]
        if not content:
            written["content"] = shape.call_content
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        written |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return written


def _content(content: Any, content_format: str) -> Any:
    if content_format == "text":
        return text_of_content(content)
    if content_format == "parts" and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _written_call(call: dict[str, Any], arguments_format: ArgumentsFormat) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"] or "{}"
    if arguments_format == "object":
        arguments = arguments_object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a past tool call, given as JSON, as an object.

    An empty text and null become an empty object. A text that is no JSON object, for instance because max_tokens cut it
    short, becomes {"arguments": text}. It is not refused, because a caller cannot correct an old output.
    """
    try:
        arguments = orjson.loads(text or "{}")
    except ValueError:
        return {"arguments": text}
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        return {"arguments": text}
    return arguments


def _one_call_a_message(messages: list[Message]) -> list[Message]:
    """Return the messages with each call in a message of its own, and its result behind it: some templates refuse
    several calls in one message.

    A result without the id of a call belongs to the first call that no other result names.
    """
    # assistant calls a and b, result of a, result of b: assistant calls a, result of a, assistant calls b, result of b
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        results_by_call = _results_by_call(calls, results)
        for number, call in enumerate(calls):
            if number:
                message = {"role": message["role"], "content": ""}
            found.append({**message, "tool_calls": [call]})
            found += results_by_call[number]
    return found


def _results_by_call(calls: Sequence[Any], results: list[Message]) -> list[list[Message]]:
    """Return the results of each call. The last call's have all that are left over."""
    ids = [call.get("id") for call in calls]
    found: list[list[Message]] = [[] for _ in calls]
    others: list[Message] = []
    for result in results:
        result_id = result.get("tool_call_id")
        if result_id is not None and result_id in ids:
            found[ids.index(result_id)].append(result)
        else:
            others.append(result)
    for answers in found:
        if not answers and others:
            answers.append(others.pop(0))
    found[-1] += others
    return found


def _merge_systems(messages: list[Message]) -> list[Message]:
    # [user, system "a", system "b"]: [system "a\n\nb", user]
    systems: list[Message] = []
    others: list[Message] = []
    for message in messages:
        if message["role"] in SYSTEM_ROLES:
            systems.append(message)
        else:
            others.append(message)
    text = joined_texts(systems)
    if not text and not any("tools" in message for message in systems):
        return others
    return [{**systems[0], "content": text}, *others]


def merge_leading_systems(messages: list[Message]) -> list[Message]:
    """Return the messages with the system messages at the start merged into one."""
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] in SYSTEM_ROLES:
        num_leading += 1
    if num_leading < 2:
        return messages
    leading = messages[:num_leading]
    return [{**leading[0], "content": joined_texts(leading)}, *messages[num_leading:]]


def joined_texts(messages: list[Message]) -> str:
    """Return the texts of messages, joined by empty lines. Messages without text are left out."""
    texts = [text_of_content(message["content"]) for message in messages]
    return "\n\n".join(filter(None, texts))


def _alternate(messages: list[Message]) -> list[Message]:
    # user "a", user "b": user "a\n\nb". system, assistant: system, user "", assistant
    runs: list[list[Message]] = []
    previous = "system"
    for message in messages:
        role = message["role"]
        if role == previous and role in ("user", "assistant"):
            runs[-1].append(message)
            continue
        if role == "assistant" and previous in SYSTEM_ROLES:
            runs.append([{"role": "user", "content": ""}])
        elif role == "user" and previous == "tool":
            runs.append([{"role": "assistant", "content": ""}])
        runs.append([message])
        previous = role
    return [_joined(run) for run in runs]


def _joined(run: list[Message]) -> Message:
    if len(run) == 1:
        return run[0]
    joined: Message = {}
    calls: list[Any] = []
    reasoning: list[str] = []
    for message in run:
        joined |= message
        calls += message.get("tool_calls", ())
        if message.get("reasoning_content"):
            reasoning.append(message["reasoning_content"])
    joined["content"] = joined_texts(run)
    if calls:
        joined["tool_calls"] = calls
    if reasoning:
        joined["reasoning_content"] = "\n\n".join(reasoning)
    return joined


def _system_in_user(messages: list[Message]) -> list[Message]:
    # For templates that have no place for a system message.
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return messages
    return _alternate([{"role": "user", "content": text_of_content(messages[0]["content"])}, *messages[1:]])


def unknown_role(messages: list[Message], source: str) -> tuple[int, str] | None:
    """Return index and role of the first message whose role is neither in ROLES nor named in the template's source.

    None if there is none.
    """
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not _names_role(source, role):
            return index, role
    return None


def _names_role(source: str, role: str) -> bool:
    # A quoted mark or empty text in a template is no role.
    is_word = role.replace("-", "_").isidentifier()
    return is_word and (f'"{role}"' in source or f"'{role}'" in source)
