"""The format that a request demands of its output, before it is checked. The front ends create it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outrider.wire.errors import InvalidRequest

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format that an output must have: its kind, such as a JSON schema, and its value."""

    kind: Kind
    value: Any
    """What the output must match. By `kind`: a JSON schema or its text, None (json_object), a regular expression, a
    list of texts, or a grammar in Lark or GBNF."""
    param: str
    """Name of the request's field, as the caller's protocol spells it, for errors."""
    strict: bool = False


def one_output(given: dict[str, Any], strict: bool = False) -> OutputFormat:
    """Return the output format that `structured_outputs` asks for. Exactly one field of `structured_outputs` must have
    a value.

    given: all fields by name, None where the request sets none. strict: whether a JSON schema must also follow OpenAI's
    rules for `strict: true`. Raises InvalidRequest if none or several fields are set.
    """
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(named) or 'nothing'}, must have one of {', '.join(given)}",
            param="structured_outputs",
        )
    kind: Kind = named[0]  # type: ignore[assignment]
    return OutputFormat(kind, given[kind], f"structured_outputs.{kind}", strict)
