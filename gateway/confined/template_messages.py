"""Writes a chat's messages as one template reads them, and in other ways where it refuses them as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.confined.template_shape import ArgumentsForm, Message, TemplateShape, text_of_content

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates look for the reasoning of a past message."""


def ways_of(messages: list[Message], source: str, shape: TemplateShape, merges: bool) -> Iterator[list[Message]]:
    """Yield the messages as a template of this source may take them, what was sent first.

    messages: `content` is text or text parts, arguments of calls are texts. merges: system messages that a template
    refuses where they stand are merged into the first, and roles made to alternate.
    """
    known = [_with_known_role(message, source) for message in messages]
    yield from _written_ways(known, shape)
    if not merges:
        return
    before = known
    for change in (_merge_systems, _alternate, _system_in_user):
        after = change(before)
        if after != before:
            yield from _written_ways(after, shape)
        before = after


def _written_ways(messages: list[Message], shape: TemplateShape) -> Iterator[list[Message]]:
    """Yield them with arguments in each form, and without reasoning beside text and calls, which some refuse."""
    has_calls = any(message.get("tool_calls") for message in messages)
    forms = shape.arguments_forms() if has_calls else (shape.arguments,)
    bare = [_without_reasoning(message) for message in messages]
    for form in forms:
        yield [_written(message, shape, form) for message in messages]
        if bare != messages:
            yield [_written(message, shape, form) for message in bare]


def _with_known_role(message: Message, source: str) -> Message:
    """Call the developer role by its older name, system, where the template does not know it."""
    if message["role"] == "developer" and "developer" not in source:
        return {**message, "role": "system"}
    return message


def _without_reasoning(message: Message) -> Message:
    if not message.get("tool_calls") or not message["content"]:
        return message
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _written(message: Message, shape: TemplateShape, form: ArgumentsForm) -> Message:
    """Return a message in the form that the template reads."""
    content = message["content"]
    calls = message.get("tool_calls")
    written = {**message, "content": _content(content, shape.contents.get(message["role"], "text"))}
    if calls:
        written["tool_calls"] = [_written_call(call, form) for call in calls]
        if not content:
            written["content"] = shape.call_content
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        written |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return written


def _content(content: Any, form: str) -> Any:
    if form == "text":
        return text_of_content(content)
    if form == "parts" and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _written_call(call: dict[str, Any], form: ArgumentsForm) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    value = arguments_object(arguments) if form == "object" else arguments or "{}"
    return {**call, "function": {**function, "arguments": value}}


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a past call as an object. Nothing is an empty one; of a text that is no JSON object, such
    as one that a limit of tokens cut short, the object holds the text: nobody can mend the past.
    """
    try:
        found = orjson.loads(text or "{}")
    except ValueError:
        found = text
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": text}


def _merge_systems(messages: list[Message]) -> list[Message]:
    """Merge all system messages into the first, which begins the chat; leave out an empty one."""
    systems = [message for message in messages if message["role"] in SYSTEM_ROLES]
    others = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    text = joined_texts(systems)
    return [{**systems[0], "content": text}, *others] if text else others


def merge_leading_systems(messages: list[Message]) -> list[Message]:
    """Make one message of the system messages that a chat begins with."""
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] in SYSTEM_ROLES:
        num_leading += 1
    if num_leading < 2:
        return messages
    leading = messages[:num_leading]
    return [{**leading[0], "content": joined_texts(leading)}, *messages[num_leading:]]


def joined_texts(messages: list[Message]) -> str:
    """Return the texts of messages, joined by empty lines."""
    texts = [text_of_content(message["content"]) for message in messages]
    return "\n\n".join(text for text in texts if text)


def _alternate(messages: list[Message]) -> list[Message]:
    """Make user and assistant take turns: join what one of them said twice, and let the other say nothing between."""
    runs: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        previous = runs[-1][0]["role"] if runs else "system"
        if role == previous and role in ("user", "assistant"):
            runs[-1].append(message)
            continue
        if role == "assistant" and previous in SYSTEM_ROLES:
            runs.append([{"role": "user", "content": ""}])
        elif role == "user" and previous == "tool":
            runs.append([{"role": "assistant", "content": ""}])
        runs.append([message])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: list[Message]) -> Message:
    """Return one message of several of the same role."""
    joined: Message = {}
    for message in run:
        joined |= message
    joined["content"] = joined_texts(run)
    calls = [call for message in run for call in message.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    reasoning = [text for message in run if (text := message.get("reasoning_content"))]
    if reasoning:
        joined["reasoning_content"] = "\n\n".join(reasoning)
    return joined


def _system_in_user(messages: list[Message]) -> list[Message]:
    """Put the system message in front of the first user's, for templates without a place for it."""
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return messages
    return _alternate([{"role": "user", "content": text_of_content(messages[0]["content"])}, *messages[1:]])


def unknown_role(messages: list[Message], source: str) -> tuple[int, str] | None:
    """Return the place and role of the first message of a role that neither chats nor the template have."""
    for at, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not _names_role(source, role):
            return at, role
    return None


def _names_role(source: str, role: str) -> bool:
    """Return whether a template has the role's name in quotes; quoted marks and empty texts are no roles."""
    is_word = role.replace("-", "_").isidentifier()
    return is_word and (f'"{role}"' in source or f"'{role}'" in source)
