"""The grammar of values that are not JSON: text up to a tag, and Python's literals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.tools.forms.form import LarkGrammar
from gateway.tools.forms.values import as_json, choices_of

NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
"""Lark's terminal of a number, as JSON and Python write it."""
PYTHON_WORDS: Mapping[str, str] = {"boolean": '"True" | "False"', "null": '"None"'}
"""Right side of the Lark rule of the values that Python writes with words, by their JSON type."""


def text_rule(schema: Any, end: str, rule: str, grammar: LarkGrammar) -> str:
    """Return the right side of a Lark rule of a string without quotes, and the text `end` behind it.

    A schema with `enum` or `const` allows their values, another schema any text: `pattern`, `format` and lengths are
    not enforced. `rule`: prefix of the name of a rule that is added to `grammar`.
    """
    choices = choices_of(schema)
    if choices:
        ways = " | ".join(as_json(str(choice)) for choice in choices)
        grammar.rules.append(f"{rule}_choice: {ways}")
        return f"{rule}_choice {grammar.spell(end)}"
    return grammar.text_up_to(f"{rule}_text", end)


def properties_in_order(
    schema: Mapping[str, Any],
    label: str,
    grammar: LarkGrammar,
    sign: str,
    comma: str,
    rule_of: Callable[[Any, str, LarkGrammar], str],
) -> str:
    """Return the right side of a Lark rule of an object's properties in the order of `schema`. Those that are not
    required may be left out.

    `label`: prefix of the names of rules that are added to `grammar`, one for each property. `sign`: text between a key
    and its value. `comma`: Lark of the text between two properties. `rule_of`: function that gets the schema of a
    value, a prefix for names of rules and `grammar`, and returns the right side of the value's rule.
    """
    properties: Mapping[str, Any] = schema["properties"]
    required = frozenset(schema.get("required") or ())
    pairs = list[str]()
    for number, (key, value) in enumerate(properties.items()):
        rule = f"{label}_{number}"
        grammar.rules.append(f"{rule}: {json.dumps(key + sign)} {rule_of(value, rule, grammar)}")
        pairs.append(rule)
    return in_order(pairs, [key in required for key in properties], comma)


def in_order(pairs: Sequence[str], are_required: Sequence[bool], comma: str) -> str:
    """Return the right side of a Lark rule of a list in which the items that are not required may be left out.

    `pairs`: names of the items' rules. `are_required`: whether the item of each rule is required, in the order of
    `pairs`. `comma`: Lark of the text between two items.
    """
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
