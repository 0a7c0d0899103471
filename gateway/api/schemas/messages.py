"""The messages and tools of a chat. What describes one and asks for nothing is taken, from any server of this API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.api.schemas.base import MAX_NAME_CHARS, Lenient, described, note_ignored
from gateway.api.schemas.content_parts import CONTENT, read_content, thinking_of
from gateway.confined.template_shape import Message
from gateway.tools.offer import MAX_LISTED_TOOLS, Tool

CONTINUES = ("prefix", "partial")
"""Other servers' names for a message that the answer goes on with: these ask for something."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers tell of the reasoning, this one's first."""
CUSTOM_INPUT = "input"
"""The one argument of a tool that takes any text, where it is offered as a function."""


def written_arguments(value: Any) -> str:
    """Return the arguments of a past call as text, whatever they are: nobody can mend the past."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None


class CalledFunction(Lenient):
    name: str
    arguments: Annotated[str, BeforeValidator(written_arguments, json_schema_input_type=str | dict[str, Any])] = ""


class CallBody(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_other_kinds(cls, value: Any) -> Any:
        """Read a call of a tool that takes any text as that of a function."""
        custom = value.get("custom") if isinstance(value, dict) else None
        if isinstance(custom, dict) and value.get("type") == "custom":
            function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input")}}
            return {"id": value.get("id"), "function": function}
        if isinstance(value, dict) and value.get("type", "") is None:  # of a stream's later deltas
            return {name: each for name, each in value.items() if name != "type"}
        return value


class MessageBody(Lenient):
    model_config = ConfigDict(json_schema_extra={"required": ["role"]})

    role: str = Field(
        description="system, developer, user, assistant, tool, or another one that the chat template names"
    )
    name: str | None = None
    tool_calls: Annotated[list[CallBody], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "of assistant"
    )
    tool_call_id: str | None = described("of tool")
    reasoning_content: str | None = described("of assistant; `reasoning` and `thinking` are read as this")
    content: Any = Field(
        default="", description="a string or a list of text parts; null is an empty text", json_schema_extra=CONTENT
    )

    @model_validator(mode="before")
    @classmethod
    def _as_chats(cls, value: Any) -> Any:
        """Read what other servers write, and what older clients keep, in the words of chats."""
        if not isinstance(value, dict):
            return value
        for name in CONTINUES:
            if value.get(name):
                raise ValueError(
                    f"has {name}: true, which is not offered under this name; give continue_final_message: true and "
                    "add_generation_prompt: false instead"
                )
        if "role" not in value:
            return value
        role = value["role"]
        read = {name: value[name] for name in ("role", "name") if name in value}
        content = value.get("content")
        if role == "assistant":
            content, thought = thinking_of(content)
            read |= _assistant_fields(value, thought)
        elif role in ("tool", "function"):
            read |= {"role": "tool", "tool_call_id": value.get("tool_call_id")}
        if content in (None, "", []) and isinstance(value.get("refusal"), str):
            content = value["refusal"]
        _note_others(value)
        return read | {"content": content}

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        return read_content(value, info.data.get("role", "user"))

    def message(self) -> Message:
        """Return it as a renderer reads it: with the texts of calls' arguments."""
        return self.model_dump(exclude_none=True)


KNOWN = frozenset({*MessageBody.model_fields, *REASONING_NAMES, "refusal", "function_call", "thinking_blocks"})
"""What is read of a message."""


def _note_others(value: dict[str, Any]) -> None:
    for name in value.keys() - KNOWN:
        if value[name] not in (None, [], False):
            note_ignored(f"{name[:MAX_NAME_CHARS]!r} of a message")


def _assistant_fields(value: dict[str, Any], thought: str) -> dict[str, Any]:
    """Return the calls and the reasoning of a message."""
    texts = [value.get(name) for name in REASONING_NAMES]
    texts.append(_thinking_blocks(value.get("thinking_blocks")) or thought)
    reasoning = next((text for text in texts if isinstance(text, str) and text), None)
    calls = value.get("tool_calls")
    older = value.get("function_call")
    if not calls and isinstance(older, dict) and older.get("name"):
        calls = [{"id": "", "function": older}]
    return {"reasoning_content": reasoning, "tool_calls": calls or None}


def _thinking_blocks(value: Any) -> str:
    return thinking_of(value)[1]


class FunctionBody(Lenient):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = described("JSON Schema of an object. Default: there are none")
    strict: bool | None = described(
        "whether calls are held to the schema under `tool_choice: auto`, too. Default: false"
    )


class ToolBody(Lenient):
    type: Literal["function"]
    function: FunctionBody

    def tool(self, place: int) -> Tool | None:
        """Return it as the `place`-th of its request."""
        each = self.function
        where = f"tools[{place}].function.parameters"
        return Tool(each.name, each.description, each.parameters, each.strict, where)


class LeftOutTool(Lenient):
    """A tool that nobody here could run, and that the model is not offered. The log names its type once."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        note_ignored(f"tools of type {value['type'][:MAX_NAME_CHARS]!r}, which are not offered to the model")
        return {"type": value["type"]}

    def tool(self, place: int) -> None:
        """Return None: it is not offered."""


def tool_kind(*kinds: str) -> Discriminator:
    """Return what tells tools of these types, or of none, from those that are left out."""

    def kind_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return "<left out>" if isinstance(kind, str) and kind not in kinds else "<offered>"

    return Discriminator(kind_of)


class OtherTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function"]}})


AnyTool = Annotated[
    Annotated[ToolBody, Tag("<offered>")] | Annotated[OtherTool, Tag("<left out>")], tool_kind("function")
]
