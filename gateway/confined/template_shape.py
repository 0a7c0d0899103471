"""How a chat template reads messages, found by rendering marked ones: no two families agree, and none says it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
"""Returns the text of messages, empty where the template refuses them."""
ContentForm = Literal["text", "parts", "both"]
ArgumentsForm = Literal["object", "text"]

_MARK = "outrider-mark"
"""Text of the content that is looked for."""
_NAME = "outrider_name"
_KEY = "outrider_key"
_VALUE = "outrider-value"
"""Of the call: the content of its result is looked for beside it."""
_AS_VALUE = re.compile(rf"""['"]text\\?['"]\s*:\s*\\?['"]{_MARK}""")
"""A part that was written as a value of Python or JSON: the template takes no parts."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": ""}}, "required": []},
    },
}
"""The tool that the marked call is of."""


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """What a template finds in a message, and in which form."""

    contents: dict[str, ContentForm] = field(default_factory=dict)
    """By role, the form of `content` whose text is shown; text for a role that is not here."""
    call_content: str | None = ""
    """Content of a message that has calls and no text. None for templates that look for calls beside null alone."""
    arguments: ArgumentsForm = "object"
    """The form of a call's arguments that is shown as JSON."""

    marks_turns: bool = True
    """Whether it writes more of a user's message than its text; a template that refuses it, as a chat's, is said to."""

    def arguments_forms(self) -> tuple[ArgumentsForm, ArgumentsForm]:
        """Return both forms, the one that is tried first in front."""
        return ("text", "object") if self.arguments == "text" else ("object", "text")


def shape_of(render: Render) -> TemplateShape:
    """Return how a template reads messages. `render` offers the tool PROBE_TOOL beside calls."""
    contents: dict[str, ContentForm] = {}
    user: Message = {"role": "user", "content": "hello"}
    contents["user"] = _content_form(render, lambda content: [{"role": "user", "content": content}])
    if contents["user"] == "parts":
        user = {"role": "user", "content": _parts("hello")}
    contents["system"] = _content_form(render, lambda content: [{"role": "system", "content": content}, user])
    contents["assistant"] = _content_form(
        render, lambda content: [user, {"role": "assistant", "content": content}, user]
    )
    call_content, arguments = _call_form(render, user)
    call = _call(call_content, arguments)
    contents["tool"] = _content_form(render, lambda content: [user, call, _result(content)])
    return TemplateShape(contents, call_content, arguments)


def _content_form(render: Render, messages: Callable[[Any], list[Message]]) -> ContentForm:
    takes_text = _MARK in render(messages(_MARK))
    shown = render(messages(_parts(_MARK)))
    takes_parts = _MARK in shown and _AS_VALUE.search(shown) is None
    if not takes_parts:
        return "text"
    return "both" if takes_text else "parts"


def _call_form(render: Render, user: Message) -> tuple[str | None, ArgumentsForm]:
    """Return the content and the form of arguments with which a call is shown."""
    for content, arguments in _call_forms():
        shown = render([user, _call(content, arguments), _result("done")])
        is_shown = _KEY in shown and _VALUE in shown
        if is_shown and f"'{_KEY}'" not in shown:  # as Python writes it, which is no JSON
            return content, arguments
    return "", "object"


def _call_forms() -> Iterator[tuple[str | None, ArgumentsForm]]:
    for content in ("", None):
        yield content, "object"
        yield content, "text"


def _call(content: str | None, arguments: ArgumentsForm) -> Message:
    value = {_KEY: _VALUE}
    written = value if arguments == "object" else json.dumps(value)
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": written}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def text_of_content(content: str | Sequence[dict[str, str]] | None) -> str:
    """Return the text of a message's content. Parts are joined by newlines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
