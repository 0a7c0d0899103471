"""The tools of POST /v1/responses: what the model is offered, and how a call of it is told to the client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from gateway.api.base_schemas import Lenient, described
from gateway.api.message_schemas import CUSTOM_INPUT, is_left_out, only_type
from gateway.tools.offer import Tool

KINDS = ("function", "custom", "namespace")
"""Types of the tools that are offered to the model."""
ANY_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""The parameters of a tool that takes any text."""


class ResponsesTool(Lenient):
    """A function, a tool that takes any text, a namespace of these, or one of OpenAI's own, which is left out."""

    type: str = Field(description="function, custom or namespace; a tool of another type is left out")
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = described("JSON Schema of an object. Default: there are none")
    strict: bool | None = described("as chat's. Default: false")
    format: dict[str, Any] | None = described("of custom: `text`, or a grammar, which the model is told of")
    tools: list[InnerTool] | None = described("of namespace: functions and custom tools")

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: Any) -> Any:
        return only_type(value) if isinstance(value, dict) and is_left_out(value, *KINDS) else value

    @model_validator(mode="after")
    def _has_name(self) -> ResponsesTool:
        if self.type in KINDS and not self.name:
            raise ValueError(f"has type {self.type} and no name; they go together")
        return self


class InnerTool(ResponsesTool):
    """A tool in a namespace."""

    tools: None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the request as the model is offered it."""

    tool: Tool
    name: str
    """As the client calls it."""
    namespace: str | None
    is_custom: bool
    place: str
    """How the client spells its place in the request."""

    @property
    def call_type(self) -> str:
        """Return the type of an item that is a call of it."""
        return "custom_tool_call" if self.is_custom else "function_call"

    def item_fields(self) -> dict[str, Any]:
        """Return what a call's item says of the tool."""
        names = {"name": self.name}
        return names if self.namespace is None else {**names, "namespace": self.namespace}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def offered_tools(tools: Sequence[ResponsesTool], place: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    """Yield the tools that the model is offered."""
    for at, each in enumerate(tools):
        where = f"{place}[{at}]"
        if each.type == "namespace":
            yield from offered_tools(each.tools or (), f"{where}.tools", each.name)
        elif each.type in KINDS:
            yield _offered(each, where, namespace)


def _offered(each: ResponsesTool, place: str, namespace: str | None) -> OfferedTool:
    is_custom = each.type == "custom"
    tool = Tool(
        full_name(namespace, each.name),
        _custom_description(each) if is_custom else each.description,
        ANY_TEXT if is_custom else each.parameters,
        None if is_custom else each.strict,
        f"{place}.parameters",
    )
    return OfferedTool(tool, each.name, namespace, is_custom, place)


def _custom_description(each: ResponsesTool) -> str | None:
    """Return the description, with the grammar of the input: nothing else holds the model to it."""
    definition = (each.format or {}).get("definition")
    grammar = f"The input follows this grammar:\n{definition}" if definition else None
    return "\n\n".join(text for text in (each.description, grammar) if text) or None


ResponsesTool.model_rebuild()
