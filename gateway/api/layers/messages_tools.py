"""The fields `tools` and `tool_choice` of POST /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.schemas.base import LenientSchema, described, log_ignored
from gateway.api.schemas.messages import LeftOutTool, tool_kind
from gateway.tools.offer import Tool, ToolOffer, offer_of
from outrider.wire.errors import InvalidRequest

DIRECT = "direct"
"""Value in `allowed_callers` that allows the model itself to call a tool."""


class MessagesTool(LenientSchema):
    """A tool of a request of /v1/messages whose calls the client runs, not a server."""

    type: Literal["custom"] | None = described("custom; a tool of another type is left out")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: bool | None = described("as chat's. Default: false")
    allowed_callers: list[str] | None = described("a tool that programs alone may call is left out")

    def tool(self, index: int) -> Tool | None:
        """Return this tool as the gateway's Tool; None if the model may not call it.

        index: index of the tool in the request's `tools`, from 0. Error messages name it.
        """
        if self.allowed_callers and DIRECT not in self.allowed_callers:
            log_ignored("tools that programs alone may call, which are not offered to the model")
            return None
        return Tool(self.name, self.description, self.input_schema, self.strict, f"tools[{index}].input_schema")


class ProvidersTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["custom"]}})


AnyMessagesTool = Annotated[
    Annotated[MessagesTool, Tag("<offered>")] | Annotated[ProvidersTool, Tag("<left out>")], tool_kind("custom")
]


class ToolChoice(LenientSchema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = described("of the tool, with type tool")
    disable_parallel_tool_use: bool | None = described("at most one call. Default: false")

    def offer(self, tools: Sequence[Tool]) -> ToolOffer:
        """Return the ToolOffer of a request with these tools and this `tool_choice`.

        It holds the tools that the model may call, and whether the model must call one, and which. Raises
        InvalidRequest for a tool that cannot be called, and for a `tool_choice` that does not fit the tools.
        """
        if (self.type == "tool") is (self.name is None):
            text = f"tool_choice has type {self.type} and {'no ' * (self.name is None)}name; they go together"
            raise InvalidRequest(text, param="tool_choice.name")
        choice = {"any": "required", "tool": (self.name,)}.get(self.type, self.type)
        return offer_of(tools, choice, not self.disable_parallel_tool_use)
