"""The grammar of values that are not JSON: text up to a tag, and Python's literals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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


def properties_in_order(
    schema: Mapping[str, Any],
    label: str,
    parts: GrammarParts,
    sign: str,
    comma: str,
    rule_of: Callable[[Any, str, GrammarParts], str],
) -> str:
    """Add a rule for each property of a schema, its key, `sign` and its value, and return the rule of all in order.

    label: prefix of the rules' names. comma: what stands between two properties, in Lark. rule_of: (schema of a value,
    name of its rule, parts) -> the value's rule.
    """
    properties: Mapping[str, Any] = schema["properties"]
    required = frozenset(schema.get("required") or ())
    pairs = list[str]()
    for number, (key, value) in enumerate(properties.items()):
        rule = f"{label}_{number}"
        parts.rules.append(f"{rule}: {json.dumps(key + sign)} {rule_of(value, rule, parts)}")
        pairs.append(rule)
    return in_order(pairs, [key in required for key in properties], comma)


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
