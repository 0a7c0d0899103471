"""Finds which types of message fields a chat template reads, by rendering messages with texts that are searched in the
result. Templates of different models read different types.

`templates.py` calls `shape_of` once for each template; `template_messages.py` writes messages of that shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""A message of a chat as templates read it: an object with `role`, `content` and other fields."""
Render = Callable[[list[Message]], str]
"""Function that renders messages with the template, and returns the text; empty if the template refuses them."""
ContentFormat = Literal["text", "parts", "both"]
ArgumentsFormat = Literal["object", "text"]
ToolsFormat = Literal["list", "text"]

_TOOLS_FORMATS: tuple[ToolsFormat, ...] = ("list", "text")
SYSTEM_ROLES = ("system", "developer")
"""Roles of system messages, which instruct the model: the older and the newer name in OpenAI's API."""
_MARK = "outrider-mark"
"""Content of a trial message, which is then searched in the rendered text."""
_NAME = "outrider_name"
"""Name of the tool that a trial message calls."""
_KEY = "outrider_key"
"""Name of the argument with which a trial message calls the tool."""
_VALUE = "outrider-value"
"""Value of the argument with which a trial message calls the tool."""
_AS_VALUE = re.compile(rf"""['"]text\\?['"]\s*:\s*\\?['"]{_MARK}""")
"""Pattern of a text part that was printed as a value of Python or JSON, which shows that the template reads no parts.
"""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": ""}}, "required": []},
    },
}
"""Definition of the tool that is called in a trial message, with which a template is examined."""


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """Types that one chat template expects for a message's fields, such as a text or a list of parts for `content`."""

    contents: dict[str, ContentFormat] = field(default_factory=dict)
    """Type that the template expects for `content`, by role: a `text`, a list of `parts`, or `both`. For roles without
    an entry it is `text`."""
    call_content: str | None = ""
    """Content for an assistant message that has tool calls and no text. None for templates that write calls only if the
    content is null."""
    arguments: ArgumentsFormat = "object"
    """Type in which the template must be given a tool call's arguments to write them as valid JSON: an `object`, or a
    `text` that is JSON already."""

    message_tools: ToolsFormat | None = None
    """Type in which the template must be given a system message's `tools` to write them: a `list`, or the functions'
    JSON as `text`. None for templates that read no tools there, such as those that read the variable `tools`."""
    marks_roles: bool = True
    """Whether the template adds anything, such as the role, to the text of a user's message. True also if that is
    unknown, because the template refuses a single user message."""

    def arguments_formats(self) -> tuple[ArgumentsFormat, ArgumentsFormat]:
        """Return the types of a tool call's arguments, `text` and `object`, first the one that the template expects."""
        if self.arguments == "text":
            return "text", "object"
        return "object", "text"


def shape_of(render: Render) -> TemplateShape:
    """Return the types that a template expects for a message's fields. It renders trial messages to find out.

    render: renders messages with the template, and passes PROBE_TOOL to the template if a message has tool calls.
    """
    contents: dict[str, ContentFormat] = {}
    user: Message = {"role": "user", "content": "hello"}
    contents["user"] = _content_format(render, lambda content: [{"role": "user", "content": content}])
    if contents["user"] == "parts":
        user = {"role": "user", "content": _parts("hello")}
    contents["system"] = _content_format(render, lambda content: [{"role": "system", "content": content}, user])
    contents["assistant"] = _content_format(
        render, lambda content: [user, {"role": "assistant", "content": content}, user]
    )
    call_content, arguments = _call_format(render, user)
    call = _call(call_content, arguments)
    contents["tool"] = _content_format(render, lambda content: [user, call, _result(content)])
    return TemplateShape(contents, call_content, arguments, _message_tools(render, user))


def _content_format(render: Render, messages: Callable[[Any], list[Message]]) -> ContentFormat:
    takes_text = _MARK in render(messages(_MARK))
    shown = render(messages(_parts(_MARK)))
    takes_parts = _MARK in shown and _AS_VALUE.search(shown) is None
    if not takes_parts:
        return "text"
    if takes_text:
        return "both"
    return "parts"


def _message_tools(render: Render, user: Message) -> ToolsFormat | None:
    """Return the first format in which the template writes the tools of a system message.

    A template that writes all fields of a message writes those of another name as well: it reads no tools.
    """
    for tools_format in _TOOLS_FORMATS:
        tools = tools_of_message([PROBE_TOOL], tools_format)
        system = {"role": "system", "content": "", "tools": tools}
        other = {"role": "system", "content": "", "outrider_field": tools}
        if _NAME in render([system, user]) and _NAME not in render([other, user]):
            return tools_format
    return None


def with_message_tools(messages: Sequence[Message], tools: Sequence[Any], tools_format: ToolsFormat) -> list[Message]:
    """Return a chat's messages with the tools in the field `tools` of the system message at the beginning.

    If the first message has no role of SYSTEM_ROLES, a system message with an empty text is put before it.
    tools_format: `list`, or `text` for the functions' JSON.
    """
    first: Message = {"role": "system", "content": ""}
    others = list(messages)
    if others and others[0]["role"] in SYSTEM_ROLES:
        first = others.pop(0)
    return [{**first, "tools": tools_of_message(tools, tools_format)}, *others]


def tools_of_message(tools: Sequence[Any], tools_format: ToolsFormat) -> Any:
    """Return the value of a system message's field `tools`. tools_format: `list`, or `text` for the functions' JSON."""
    if tools_format == "list":
        return list(tools)
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


def _call_format(render: Render, user: Message) -> tuple[str | None, ArgumentsFormat]:
    """Return the first content and format of arguments with which the template writes a call's arguments as JSON."""
    for content, arguments in _call_formats():
        shown = render([user, _call(content, arguments), _result("done")])
        has_arguments = _KEY in shown and _VALUE in shown
        is_python = f"'{_KEY}'" in shown
        if has_arguments and not is_python:
            return content, arguments
    return "", "object"


def _call_formats() -> Iterator[tuple[str | None, ArgumentsFormat]]:
    for content in ("", None):
        yield content, "object"
        yield content, "text"


def _call(content: str | None, arguments: ArgumentsFormat) -> Message:
    value: Any = {_KEY: _VALUE}
    if arguments == "text":
        value = json.dumps(value)
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": value}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def text_of_content(content: str | Sequence[dict[str, str]] | None) -> str:
    """Return the text of a message's content. Texts of parts are joined by newlines; None becomes an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
