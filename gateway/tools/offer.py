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
"""Maximum number of tools in a request body, and of calls in one of its messages. The setting `max_tools` may allow
fewer tools."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""JSON schema of the arguments of a tool without parameters."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the tool's arguments, which are an object. None = the tool has no parameters."""
    strict: bool | None = None
    """Whether every call has to follow the schema; the request is refused if that cannot be enforced. None = False."""
    schema_path: str | None = None
    """Path of `parameters` in the request, for errors. None = `tools[INDEX].function.parameters`, the path in a request
    of `/v1/chat/completions`."""

    def path(self, index: int) -> str:
        """Return the path of `parameters` in the request, for errors. index: the tool's in the request, from 0."""
        return self.schema_path or f"tools[{index}].function.parameters"

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it: `{"type": "function", "function": {"name": "f", ...}}`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or NO_PARAMETERS
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Which tools a request lets the model call (offers it), and whether the model must call one.

    # "tools": [f, g], "tool_choice": "auto": the model may call f, g, both or none
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    """auto: the model may answer with text, calls or both. required: the output has to be calls."""
    required_tool: str | None = None
    """Name of the tool that has to be called, once, and no other; `choice` is then required. None = any of `tools`."""
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
        """Maximum number of calls in an output; None = any number."""
        if self.parallel and self.required_tool is None:
            return None
        return 1

    @property
    def callable_tools(self) -> list[tuple[int, Tool]]:
        """The tools that may be called, each as (index in `tools`, tool): all, or only the required tool."""
        return [(index, tool) for index, tool in enumerate(self.tools) if self.required_tool in (None, tool.name)]


NO_TOOLS = ToolOffer()


def offer_of(tools: Sequence[Tool], choice: Any, parallel: bool | None) -> ToolOffer:
    """Return which tools the model may or must call, by OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.

    `choice`: "none", "auto", "required", None (as "auto"), or `(name,)` for the one tool that must be called.
    `parallel`: None = True. Raises InvalidRequest for a tool that cannot be called, such as one with an invalid name,
    and for a choice that needs tools which the request does not have.
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
    """Raise InvalidRequest if a request has more tools than `max_tools`, or their JSON more bytes than `max_bytes`."""
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


def _path_of_name(tool: Tool, index: int) -> str:
    # tools[0].function.parameters: tools[0].function
    return tool.path(index).rpartition(".")[0]


def _check(tools: Sequence[Tool]) -> int:
    """Raise InvalidRequest for a tool that cannot be called. Return the bytes of all tools as JSON."""
    indices: dict[str, int] = {}
    for index, tool in enumerate(tools):
        schema = tool.path(index)
        param = _path_of_name(tool, index)
        if re.fullmatch(TOOL_NAME, tool.name) is None:
            raise InvalidRequest(
                f"{param}.name is {tool.name[:80]!r}, must be 1 to 128 letters, digits or ._:-", param=f"{param}.name"
            )
        first = indices.setdefault(tool.name, index)
        if first != index:
            other = _path_of_name(tools[first], first)
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
