"""The tools of POST /v1/responses: functions, custom tools (which take any text), and namespaces of both.

The model is offered only functions, each under a single name. An OfferedTool holds the names that the client gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.schemas.base import LenientSchema, described
from gateway.api.schemas.messages import CUSTOM_INPUT, LeftOutTool, tool_kind, type_field
from gateway.tools.offer import Tool

ANY_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""JSON schema for the arguments of the function that represents a custom tool in the prompt: one text."""


class ResponsesTool(LenientSchema):
    """A tool of the request: a function, whose arguments are JSON, or a custom tool, whose input is any text."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = described("JSON Schema of an object. Default: there are none")
    strict: bool | None = described("as chat's. Default: false")
    format: dict[str, Any] | None = described("of custom: `text`, or a grammar, which the model is told of")


class ResponsesOtherTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function", "custom"]}})


InnerTool = Annotated[
    Annotated[ResponsesTool, Tag("<offered>")] | Annotated[ResponsesOtherTool, Tag("<left out>")],
    tool_kind("function", "custom"),
]


class NamespaceTool(LenientSchema):
    """A namespace in a request's `tools`: several tools, which the model calls by `namespace__name`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[InnerTool] = Field(default_factory=list)


class OuterTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["function", "custom", "namespace"]}})


def _tool_tag(value: Any) -> str:
    kind = type_field(value)
    if kind == "namespace":
        return "<namespace>"
    if isinstance(kind, str) and kind not in ("function", "custom"):
        return "<left out>"
    return "<offered>"


AnyResponsesTool = Annotated[
    Annotated[ResponsesTool, Tag("<offered>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[OuterTool, Tag("<left out>")],
    Discriminator(_tool_tag),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call: the function that represents it in the prompt, and the client's names for it."""

    tool: Tool
    """Function that represents the tool in the prompt."""
    name: str
    """The client's name for the tool, without its namespace."""
    namespace: str | None
    is_custom: bool
    """Whether it is a custom tool, whose input is any text; otherwise it is a function."""
    path: str
    """Path of the tool in the request, such as `tools[0].tools[1]`, for errors."""

    @property
    def call_type(self) -> str:
        """Type of the output items that are calls of this tool."""
        if self.is_custom:
            return "custom_tool_call"
        return "function_call"

    def item_fields(self) -> dict[str, Any]:
        """Return the fields by which the output item of a call tells the client which tool is called."""
        if self.namespace is None:
            return {"name": self.name}
        return {"name": self.name, "namespace": self.namespace}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name with which the model calls a tool: `namespace__name`, or `name` without a namespace."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"


def offered_tools(tools: Sequence[Any]) -> Iterator[OfferedTool]:
    """Yield the tools that the model may call, in the order of a request's `tools`, with those in its namespaces."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, ResponsesTool):
            yield _offered(tool, path, None)
        elif isinstance(tool, NamespaceTool):
            for inner_index, inner in enumerate(tool.tools):
                if isinstance(inner, ResponsesTool):
                    yield _offered(inner, f"{path}.tools[{inner_index}]", tool.name)


def _offered(body: ResponsesTool, path: str, namespace: str | None) -> OfferedTool:
    name = full_name(namespace, body.name)
    is_custom = body.type == "custom"
    if is_custom:
        tool = Tool(name, _custom_description(body), ANY_TEXT, None, f"{path}.parameters")
    else:
        tool = Tool(name, body.description, body.parameters, body.strict, f"{path}.parameters")
    return OfferedTool(tool, body.name, namespace, is_custom, path)


def _custom_description(body: ResponsesTool) -> str | None:
    """The grammar of the input is in the description: nothing else holds the model to it."""
    paragraphs = []
    if body.description:
        paragraphs.append(body.description)
    definition = (body.format or {}).get("definition")
    if definition:
        paragraphs.append(f"The input follows this grammar:\n{definition}")
    return "\n\n".join(paragraphs) or None
