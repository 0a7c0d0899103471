"""The tools that a request offers the model, and which of them it may or must call.

The bodies of all front ends make a ToolOffer with `offer_of`, which checks them alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.tools.call_families import TOOL_NAME
from outrider.wire.errors import InvalidRequest

MAX_LISTED_TOOLS = 4096
"""Tools of a request, and calls of a message, that a body may have at all. The setting `max_tools` may allow fewer."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""JSON schema of the arguments of a tool without parameters."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; None = it has none."""
    strict: bool | None = None
    """Whether every call has to follow the schema; the request is refused if that cannot be enforced. None = False."""
    schema_place: str | None = None
    """Path of `parameters` in the request, for errors; None = that of a chat."""

    def place(self, index: int) -> str:
        """Return the path of `parameters` in a request in which the tool has this index."""
        return self.schema_place or f"tools[{index}].function.parameters"

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or NO_PARAMETERS
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a request, and the choice among them."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    """required: the output has to be calls."""
    required_tool: str | None = None
    """Name of the only tool that may be called, once; `choice` is then required."""
    parallel: bool = True
    """Whether an output may have several calls."""
    continued_text: str = ""
    """Text of the last message of the chat, if the output continues it; else empty."""
    num_bytes: int = 0
    """UTF-8 bytes of all tools together, as compact JSON."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tools."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def max_calls(self) -> int | None:
        """Calls that an output may have; None = any number."""
        if self.parallel and self.required_tool is None:
            return None
        return 1

    @property
    def callable_tools(self) -> list[tuple[int, Tool]]:
        """The tools that may be called, each with its index in the request."""
        return [(index, tool) for index, tool in enumerate(self.tools) if self.required_tool in (None, tool.name)]


NO_TOOLS = ToolOffer()


def offer_of(tools: Sequence[Tool], choice: Any, parallel: bool | None) -> ToolOffer:
    """Return the offer of OpenAI's parameters `tools`, `tool_choice` and `parallel_tool_calls`.

    `choice`: "none", "auto", "required", None, or `(name,)` of a tool. Raises InvalidRequest for a tool that cannot be
    called and for a choice that does not fit the tools.
    """
    named = None
    if isinstance(choice, tuple):
        named = choice[0]
    if not tools:
        if choice in (None, "auto", "none"):
            return NO_TOOLS
        problem = f"is {choice!r}"
        if named is not None:
            problem = f"names the tool {named!r}"
        raise InvalidRequest(
            f"tool_choice {problem}, and there are no tools; give some, or leave it out", param="tool_choice"
        )
    num_bytes = _check(tools)
    if named is not None:
        _check_is_named(tools, named)
    if choice == "none":
        return NO_TOOLS
    required_or_auto: Literal["auto", "required"] = "auto"
    if named is not None or choice == "required":
        required_or_auto = "required"
    return ToolOffer(tuple(tools), required_or_auto, named, parallel is not False, num_bytes=num_bytes)


def _check_is_named(tools: Sequence[Tool], name: str) -> None:
    names = [tool.name for tool in tools]
    if name in names:
        return
    shown = ", ".join(map(repr, names[:8]))
    if len(names) > 8:
        shown += ", ..."
    raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is none of the tools: {shown}", param="tool_choice")


def check_size(offer: ToolOffer, max_tools: int, max_bytes: int) -> None:
    """Raise InvalidRequest for more tools, or more bytes of them, than the gateway's settings allow."""
    num_tools = len(offer.tools)
    if num_tools > max_tools:
        raise InvalidRequest(
            f"tools has {num_tools} tools, at most {max_tools} are allowed (--max-tools); offer fewer", param="tools"
        )
    if offer.num_bytes > max_bytes:
        raise InvalidRequest(
            f"tools has {offer.num_bytes} bytes, at most {max_bytes} are allowed (--max-tools-bytes); shorten them",
            param="tools",
        )


def _place_of_name(tool: Tool, index: int) -> str:
    # tools[0].function.parameters: tools[0].function
    return tool.place(index).rpartition(".")[0]


def _check(tools: Sequence[Tool]) -> int:
    """Raise InvalidRequest for a tool that cannot be called. Return the bytes of all tools as JSON."""
    indices: dict[str, int] = {}
    for index, tool in enumerate(tools):
        schema = tool.place(index)
        param = _place_of_name(tool, index)
        if re.fullmatch(TOOL_NAME, tool.name) is None:
            raise InvalidRequest(
                f"{param}.name is {tool.name[:80]!r}, must be 1 to 128 letters, digits or ._:-", param=f"{param}.name"
            )
        first = indices.setdefault(tool.name, index)
        if first != index:
            other = _place_of_name(tools[first], first)
            raise InvalidRequest(
                f"{param}.name is {tool.name!r}, as that of {other}; name each tool once", param=f"{param}.name"
            )
        kind = (tool.parameters or NO_PARAMETERS).get("type", "object")
        if kind != "object":
            raise InvalidRequest(f"{schema} describes a {kind!r:.80}, must describe an object", param=schema)
    try:
        # In a list, so that they nest as deep as in an event of /v1/responses.
        return len(orjson.dumps([[tool.for_template() for tool in tools]]))
    except (TypeError, ValueError) as error:  # too deep, or a lone surrogate
        raise InvalidRequest(f"tools cannot be written as JSON: {error}", param="tools") from None
