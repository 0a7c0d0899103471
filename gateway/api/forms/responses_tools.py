"""The tools of POST /v1/responses: what the model is offered, and how a call of it is told to the client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.schemas.base import Lenient, described
from gateway.api.schemas.messages import CUSTOM_INPUT, LeftOutTool, tool_kind
from gateway.tools.offer import Tool

ANY_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""The parameters of a tool that takes any text."""


class ResponsesTool(Lenient):
    """A function, or a tool that takes any text."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = described("JSON Schema of an object. Default: there are none")
    strict: bool | None = described("as chat's. Default: false")
    format: dict[str, Any] | None = described("of custom: `text`, or a grammar, which the model is told of")


class OtherTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function", "custom"]}})


InnerTool = Annotated[
    Annotated[ResponsesTool, Tag("<offered>")] | Annotated[OtherTool, Tag("<left out>")],
    tool_kind("function", "custom"),
]


class NamespaceTool(Lenient):
    """Tools under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[InnerTool] = Field(default_factory=list)


class OuterTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function", "custom", "namespace"]}})


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "namespace":
        return "<namespace>"
    return "<left out>" if isinstance(kind, str) and kind not in ("function", "custom") else "<offered>"


AnyResponsesTool = Annotated[
    Annotated[ResponsesTool, Tag("<offered>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[OuterTool, Tag("<left out>")],
    Discriminator(_kind),
]


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


def offered_tools(tools: Sequence[Any]) -> Iterator[OfferedTool]:
    """Yield the tools of a request that the model is offered, those in namespaces, too."""
    for at, each in enumerate(tools):
        if isinstance(each, ResponsesTool):
            yield _offered(each, f"tools[{at}]", None)
        elif isinstance(each, NamespaceTool):
            for place, inner in enumerate(each.tools):
                if isinstance(inner, ResponsesTool):
                    yield _offered(inner, f"tools[{at}].tools[{place}]", each.name)


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
