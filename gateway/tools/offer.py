"""What tools a request offers the model, and which of them it may or must call. Checked here for every front end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.tools.families import TOOL_NAME
from outrider.wire.errors import InvalidRequest

MAX_LISTED_TOOLS = 4096
"""Tools of a request, and calls of a message, that are read at all: as many as messages. `max_tools` may allow them."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of an object; None = there are none."""
    strict: bool | None = None
    """Every call follows the schema, or the request is refused. None = the caller did not say, as False."""
    schema_place: str | None = None
    """How the caller spells the place of `parameters` in the request; None = as chats do."""

    def place(self, at: int) -> str:
        """Return the place of its `parameters` in a request of which it is the `at`-th tool."""
        return self.schema_place or f"tools[{at}].function.parameters"

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        told: dict[str, Any] = {"name": self.name, "description": self.description}
        told |= {"parameters": self.parameters or NO_PARAMETERS, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    """The tool that has to be called, once; then `choice` is required."""
    parallel: bool = True
    """Whether an answer may hold several calls."""
    continued: str = ""
    """The text of the message that an answer goes on with; empty = the answer begins one."""
    num_bytes: int = 0
    """UTF-8 bytes of all tools together, as compact JSON."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def max_calls(self) -> int | None:
        """Return how many calls an answer may hold, None for any number."""
        return None if self.parallel and self.named is None else 1

    @property
    def callable_tools(self) -> list[tuple[int, Tool]]:
        """Return those that may be called, each with its place in the request."""
        return [(at, tool) for at, tool in enumerate(self.tools) if self.named in (None, tool.name)]


NO_TOOLS = ToolOffer()


def offer_of(tools: Sequence[Tool], choice: Any, parallel: bool | None) -> ToolOffer:
    """Return the offer of OpenAI's three parameters. choice: a word, or (name,) of a tool. Raises InvalidRequest."""
    named = choice[0] if isinstance(choice, tuple) else None
    if not tools:
        if choice in (None, "auto", "none"):
            return NO_TOOLS
        shown = f"names the tool {named!r}" if named is not None else f"is {choice!r}"
        raise InvalidRequest(
            f"tool_choice {shown}, and there are no tools; give some, or leave it out", param="tool_choice"
        )
    num_bytes = _check(tools)
    if named is not None and named not in {tool.name for tool in tools}:
        known = ", ".join(repr(tool.name) for tool in tools[:8])
        more = ", ..." if len(tools) > 8 else ""
        raise InvalidRequest(
            f"tool_choice names {named[:64]!r}, which is none of the tools: {known}{more}", param="tool_choice"
        )
    if choice == "none":
        return NO_TOOLS
    must = named is not None or choice == "required"
    return ToolOffer(tuple(tools), "required" if must else "auto", named, parallel is not False, num_bytes=num_bytes)


def check_size(offer: ToolOffer, max_tools: int, max_bytes: int) -> None:
    """Raise InvalidRequest for more tools, or larger ones, than the gateway's settings allow."""
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


def _of(tool: Tool, at: int) -> str:
    """Return how the caller spells the place of a tool's name."""
    return tool.place(at).rpartition(".")[0]


def _check(tools: Sequence[Tool]) -> int:
    """Return the bytes of tools as JSON. Raise InvalidRequest for one that cannot be called."""
    places: dict[str, int] = {}
    for at, tool in enumerate(tools):
        schema = tool.place(at)
        param = _of(tool, at)
        if re.fullmatch(TOOL_NAME, tool.name) is None:
            raise InvalidRequest(
                f"{param}.name is {tool.name[:80]!r}, must be 1 to 128 letters, digits or ._:-", param=f"{param}.name"
            )
        if (first := places.setdefault(tool.name, at)) != at:
            raise InvalidRequest(
                f"{param}.name is {tool.name!r}, as that of {_of(tools[first], first)}; name each tool once",
                param=f"{param}.name",
            )
        kind = (tool.parameters or NO_PARAMETERS).get("type", "object")
        if kind != "object":
            raise InvalidRequest(f"{schema} describes a {kind!r:.80}, must describe an object", param=schema)
    try:
        # As deep as in an event of /v1/responses, which is a level more than they are alone.
        return len(orjson.dumps([[tool.for_template() for tool in tools]]))
    except (TypeError, ValueError) as error:  # too deep, or a lone surrogate
        raise InvalidRequest(f"tools cannot be written as JSON: {error}", param="tools") from None
