"""Finds which formats of messages a chat template reads, by rendering messages with marked texts. Templates of
different model families read different formats.

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
    """The forms in which one chat template reads a message, such as `content` as a text or as a list of parts."""

    contents: dict[str, ContentFormat] = field(default_factory=dict)
    """Form in which the template reads `content`, by role: a `text`, a list of `parts`, or `both`. For roles without an
    entry it is `text`."""
    call_content: str | None = ""
    """Content for an assistant message that has tool calls and no text. None for templates that write calls only if the
    content is null."""
    arguments: ArgumentsFormat = "object"
    """Form of a tool call's arguments (an object, or its JSON as text) that the template writes as JSON."""

    message_tools: ToolsFormat | None = None
    """Form of a system message's `tools` (a list, or the JSON text of the functions) that the template writes. None for
    templates that read no tools there, or that read them from a variable."""
    marks_roles: bool = True
    """Whether the template adds anything to the text of a user's message. True also if it refuses a single user
    message."""

    def arguments_formats(self) -> tuple[ArgumentsFormat, ArgumentsFormat]:
        """Return the two forms of a tool call's arguments (`text`, `object`), with the tools_format that the template
        reads first.
        """
        if self.arguments == "text":
            return "text", "object"
        return "object", "text"


def shape_of(render: Render) -> TemplateShape:
    """Return in which forms a template reads messages. Trial messages are rendered to find out.

    render: renders messages with the template. If a message has tool calls, it must pass PROBE_TOOL to the template.
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
    """Return a chat's messages with the tools in the field `tools` of a system message.

    It is the chat's first message if that has a role of SYSTEM_ROLES, or else a new one without text before it.
    """
    first: Message = {"role": "system", "content": ""}
    others = list(messages)
    if others and others[0]["role"] in SYSTEM_ROLES:
        first = others.pop(0)
    return [{**first, "tools": tools_of_message(tools, tools_format)}, *others]


def tools_of_message(tools: Sequence[Any], tools_format: ToolsFormat) -> Any:
    """Return the tools as a template reads them from the field `tools` of a system message: a list, or a JSON text."""
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
