"""What a form of calls is: it reads one call, and writes the grammar's rule of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.tools.cursor import Cursor, Parsing
from gateway.tools.parts import Arguments, CallStart

NAME = "NAME"
"""Placeholder for a tool's name in the fixed texts around a call's arguments: `<function=NAME>`."""
KEY = "KEY"
"""Placeholder for a parameter's name in the fixed texts around a call's values: `<parameter=KEY>`."""
INDEX = "INDEX"
"""Placeholder for a call's number, or for another id, in the fixed texts around a call's arguments:
`functions.NAME:INDEX` for `functions.weather:0`."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by the tool's name."""


@dataclass
class CallText:
    """State of reading one call: the text, the call's name and number. Makes the parts that a CallForm yields."""

    cursor: Cursor
    schemas: Schemas
    """The JSON Schema of each callable tool's arguments, by name. Text with another name is not read as a call."""
    index: int
    """Number of the call in the output, from 0."""
    name: str | None = None
    """Name of the called tool; None until it has been read."""

    def start(self, name: str) -> CallStart:
        """Set the name of the called tool, which has to be in `schemas`, and return the part that begins the call."""
        self.name = name
        return CallStart(self.index, name)

    def arguments(self, text: str) -> Arguments:
        """Return the part with the next piece of the call's arguments. `text`: a piece of their JSON."""
        return Arguments(self.index, text)


@dataclass
class LarkGrammar:
    """The rules and JSON Schemas that a grammar has so far, and functions to write texts in it."""

    spell: Callable[[str], str]
    """Function that returns a text as Lark writes it: in quotes, and with control tokens by their ids.

    # '<tool_call>f', with a token of id 7: '<[7]> "f"'
    """
    text_up_to: Callable[[str, str], str]
    """Function `(rule, end)` that adds rules for any text up to and with the first `end`, and returns the name of one
    that matches that text. `rule`: prefix of the names."""
    rules: list[str] = field(default_factory=list)
    """Rules in Lark so far, a text each: `name: right side`."""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """JSON Schemas so far, each as `{"name": "f", "json_schema": {...}}`. The rules refer to it as `@f`."""
    _shared: set[str] = field(default_factory=set)
    """The rules that were added with `share`."""

    def share(self, rule: str) -> bool:
        """Add a rule that the grammars of all tools use, unless it was added before. Return whether it was added."""
        if rule in self._shared:
            return False
        self._shared.add(rule)
        self.rules.append(rule)
        return True

    def schema(self, name: str, schema: Any) -> str:
        """Add a JSON Schema to `schemas`, and return the text by which rules refer to it, `@name`."""
        self.schemas.append({"name": name, "json_schema": schema})
        return f"@{name}"


class CallForm(Protocol):
    """How a model writes one call: the name of a tool and its arguments, with fixed texts around them.

    # {"name": "f", "arguments": {"x": 1}} is one form, f(x=1) another. The CallFamily gives the tags around it; many
    # families share a form.
    """

    @property
    def texts(self) -> tuple[str, ...]:
        """The fixed texts of this form: those before, between and after names and values.

        The tokenizer may have a special token for some of them, `<tool_call>` for example.
        """

    def read(self, call: CallText) -> Parsing[None]:
        """Generator, for `yield from`: read one call at the cursor, and yield its parts as soon as they are known.

        Raises NotACall if the text is not a call in this form.
        """

    def head(self, name: str) -> str:
        """Return the fixed text with which a call of the tool `name` begins; empty if the grammar needs it in `rest`.

        # f(x=1): "f(" is the head, and `rest` gives the rule of `x=1)`
        """

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        """Return the right side of the Lark rule of what stands behind `head`: the arguments and the end of the call.

        `schema`: of the arguments. `label`: prefix of the names of rules and schemas that are added to `grammar`.
        Raises InvalidRequest for a schema that cannot be enforced in this form.
        """

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        """Return a call of the tool `name` as a model writes it. `index`: number of the call, which replaces INDEX."""
