"""Reads the messages and tools of a chat, in the forms that clients of many servers write.

Clients send back messages that other servers returned. So fields that only describe a message are ignored, and other
servers' names for the same field are accepted. A field that requests something that is not offered is refused.
"""

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

from gateway.api.schemas.base import MAX_NAME_CHARS, LenientSchema, described, log_ignored
from gateway.api.schemas.content_parts import CONTENT, read_content, split_thinking
from gateway.confined.template_shape import Message
from gateway.tools.offer import MAX_LISTED_TOOLS, Tool

CONTINUES = ("prefix", "partial")
"""Fields of a message by which clients ask other servers to continue that message. A request with such a field is
refused. The error names the fields to use instead."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of the field that holds a message's reasoning. This server's responses have the first; other servers' responses
have one of the others."""
CUSTOM_INPUT = "input"
"""Name of the only argument of the function that represents a custom tool in the prompt."""


def written_arguments(value: Any) -> str:
    """Return the arguments of a past tool call as text.

    A text is returned unchanged even if it is not JSON, because a caller cannot correct what a model wrote.

    Raises ValueError for a value that cannot be written as JSON.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None


class CalledFunction(LenientSchema):
    name: str
    arguments: Annotated[str, BeforeValidator(written_arguments, json_schema_input_type=str | dict[str, Any])] = ""


class CallBody(LenientSchema):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_other_kinds(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        custom = value.get("custom")
        if isinstance(custom, dict) and value.get("type") == "custom":  # a tool that takes any text
            function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input")}}
            return {"id": value.get("id"), "function": function}
        if value.get("type", "") is None:  # as in the later deltas of a stream
            return {name: field for name, field in value.items() if name != "type"}
        return value


class MessageBody(LenientSchema):
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
        fields = {"role": role}
        if "name" in value:
            fields["name"] = value["name"]
        content = value.get("content")
        if role == "assistant":
            content, thinking = split_thinking(content)
            fields |= _assistant_fields(value, thinking)
        elif role in ("tool", "function"):
            fields |= {"role": "tool", "tool_call_id": value.get("tool_call_id")}
        if content in (None, "", []) and isinstance(value.get("refusal"), str):
            content = value["refusal"]
        _note_others(value)
        return fields | {"content": content}

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        return read_content(value, info.data.get("role", "user"))

    def message(self) -> Message:
        """Return the message in the form that `gateway.confined.templates` reads. Arguments of calls are JSON texts."""
        return self.model_dump(exclude_none=True)


READ_FIELDS = frozenset({*MessageBody.model_fields, *REASONING_NAMES, "refusal", "function_call", "thinking_blocks"})
"""Fields of a message that are read. Other fields are ignored."""


def _note_others(value: dict[str, Any]) -> None:
    for name in value.keys() - READ_FIELDS:
        if value[name] not in (None, [], False):
            log_ignored(f"{name[:MAX_NAME_CHARS]!r} of a message")


def _assistant_fields(value: dict[str, Any], thinking: str) -> dict[str, Any]:
    """Return the calls and the reasoning of an assistant's message. `thinking`: the reasoning among its content."""
    calls = value.get("tool_calls")
    older_call = value.get("function_call")
    if not calls and isinstance(older_call, dict) and older_call.get("name"):
        calls = [{"id": "", "function": older_call}]
    return {"reasoning_content": _reasoning_text(value, thinking), "tool_calls": calls or None}


def _reasoning_text(value: dict[str, Any], thinking: str) -> str | None:
    for name in REASONING_NAMES:
        text = value.get(name)
        if text and isinstance(text, str):
            return text
    _, blocks = split_thinking(value.get("thinking_blocks"))
    return blocks or thinking or None


class FunctionBody(LenientSchema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = described("JSON Schema of an object. Default: there are none")
    strict: bool | None = described(
        "whether calls are held to the schema under `tool_choice: auto`, too. Default: false"
    )


class ToolBody(LenientSchema):
    type: Literal["function"]
    function: FunctionBody

    def tool(self, index: int) -> Tool | None:
        """Return this tool as the gateway's Tool; never None.

        index: index of the tool in the request's `tools`, from 0. Error messages name it.
        """
        function = self.function
        path = f"tools[{index}].function.parameters"
        return Tool(function.name, function.description, function.parameters, function.strict, path)


class LeftOutTool(LenientSchema):
    """Base class of tools that only other servers can run. The model does not see them; each type is logged once."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        log_ignored(f"tools of type {value['type'][:MAX_NAME_CHARS]!r}, which are not offered to the model")
        return {"type": value["type"]}

    def tool(self, index: int) -> None:
        """Return None, because the model does not see the tool. `index` is not used."""


def type_field(value: Any) -> Any:
    """Return the field `type` of a JSON object or of a parsed body; None without one."""
    if isinstance(value, dict):
        return value.get("type")
    return getattr(value, "type", None)


def tool_kind(*kinds: str) -> Discriminator:
    """Return the pydantic discriminator of a union of tools.

    It gives the tag "<offered>" to tools whose type is in `kinds` or missing, and "<left out>" to others.
    """

    def kind_of(value: Any) -> str:
        kind = type_field(value)
        if isinstance(kind, str) and kind not in kinds:
            return "<left out>"
        return "<offered>"

    return Discriminator(kind_of)


class OtherTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function"]}})


AnyTool = Annotated[
    Annotated[ToolBody, Tag("<offered>")] | Annotated[OtherTool, Tag("<left out>")], tool_kind("function")
]
