"""What a form of calls is: it reads one call, and writes the grammar's rule of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.tools.cursor import Cursor, Steps
from gateway.tools.parts import Arguments, CallStart

NAME = "NAME"
"""Placeholder of a tool's name in the texts of a form."""
KEY = "KEY"
"""Placeholder of a parameter's name in the texts of a form."""
INDEX = "INDEX"
"""Placeholder of a call's number in the texts of a form."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by the tool's name."""


@dataclass
class CallText:
    """What a form reads a call from, and which parts it makes of it."""

    cursor: Cursor
    schemas: Schemas
    """Of the tools that may be called. Another name is no call."""
    index: int
    """Number of the call in the output."""
    name: str | None = None
    """Name of the tool, once it is known."""

    def start(self, name: str) -> CallStart:
        """Return the part that begins the call. `name` is in `schemas`."""
        self.name = name
        return CallStart(self.index, name)

    def arguments(self, text: str) -> Arguments:
        """Return the next piece of the arguments, as JSON."""
        return Arguments(self.index, text)


@dataclass
class GrammarParts:
    """The grammar that is being written, and how texts are spelled in it."""

    spell: Callable[[str], str]
    """Returns a text in Lark: quoted, and control tokens by their ids."""
    text_up_to: Callable[[str, str], str]
    """(name for a rule, end) -> the rule of any text up to and with `end`."""
    rules: list[str] = field(default_factory=list)
    """Rules in Lark."""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Grammars by name that rules refer to as `@name`."""

    def schema(self, name: str, schema: Any) -> str:
        """Add a JSON Schema and return the reference to it."""
        self.schemas.append({"name": name, "json_schema": schema})
        return f"@{name}"


class CallForm(Protocol):
    """How one call is written, between the texts of its family."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The fixed texts of this form: those before, between and after names and values.

        The tokenizer may have a special token for some of them, `<tool_call>` for example.
        """

    def read(self, call: CallText) -> Steps[None]:
        """Read one call, from the cursor on. Raises NotACall for another text."""

    def head(self, name: str) -> str:
        """Return the text with which a call of the tool `name` begins."""

    def rest(self, name: str, schema: Mapping[str, Any], label: str, parts: GrammarParts) -> str:
        """Return the right side of the rule of what follows `head`: arguments that follow `schema`, and the end.

        `label`: a prefix for the names of further rules and schemas. Raises InvalidRequest for a schema that cannot be
        enforced in this form.
        """

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        """Return a call as a model of the family writes it."""
