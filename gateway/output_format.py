"""The format that a caller requires of an output, before it is checked. The front ends create it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outrider.wire.errors import InvalidRequest

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format that the output must have."""

    kind: Kind
    value: Any
    """A schema (or its text), None for json_object, a regular expression, a list of strings, or Lark or GBNF."""
    param: str
    """Name of the field as the caller spelt it."""
    strict: bool = False


def one_output(given: dict[str, Any], strict: bool = False) -> OutputFormat:
    """Return the only field of `structured_outputs` that is not None. Raises InvalidRequest for none or several."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(named) or 'nothing'}, must have one of {', '.join(given)}",
            param="structured_outputs",
        )
    kind: Kind = named[0]  # type: ignore[assignment]
    return OutputFormat(kind, given[kind], f"structured_outputs.{kind}", strict)
