"""The grammar of values that are not JSON: text up to a tag, and Python's literals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tools.forms.form import GrammarParts


def text_rule(schema: Any, end: str, rule: str, parts: GrammarParts) -> str:
    """Return the rule of a string's text up to and with `end`: one of an enum's, or any.

    Other keywords of the schema (`pattern`, `format`, lengths) are not enforced here: the text is no JSON string.
    """
    choices = choices_of(schema)
    if choices:
        ways = " | ".join(json.dumps(str(choice), ensure_ascii=False) for choice in choices)
        parts.rules.append(f"{rule}_choice: {ways}")
        return f"{rule}_choice {parts.spell(end)}"
    return parts.text_up_to(f"{rule}_text", end)


def choices_of(schema: Any) -> list[Any]:
    """Return the values that a schema allows by name, none where it allows others."""
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    return list(schema.get("enum", ()))


def in_order(pairs: Sequence[str], are_required: Sequence[bool], comma: str) -> str:
    """Return the rule of pairs in their order, with `comma` between those that are there."""
    # a, b? -> a ("," b)?; with the first optional, too: (a ("," b)? | b?)
    if not pairs:
        return '""'
    found = pairs[0]
    for pair, is_required in zip(pairs[1:], are_required[1:], strict=True):
        if is_required:
            found += f" {comma} {pair}"
        else:
            found += f" ({comma} {pair})?"
    if are_required[0]:
        return found
    return f"({found} | {in_order(pairs[1:], are_required[1:], comma)})"
