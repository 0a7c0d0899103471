"""The grammar of a Python call whose arguments follow a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.tools.forms.form import LarkGrammar
from gateway.tools.forms.lark_values import NUMBER, PYTHON_WORDS, properties_in_order
from gateway.tools.forms.values import STRING, as_json, choices_of, types_of

_STRING = r'py_string: /"([^"\\\n]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/'
_QUOTED = r"py_quoted: /'([^'\\\n]|\\['\"\\\/bfnrt]|\\u[0-9a-fA-F]{4})*'/"
_SHARED = (
    _STRING,
    _QUOTED,
    f"py_number: {NUMBER}",
    'py_any: py_string | py_quoted | py_number | "True" | "False" | "None" | py_list | py_dict',
    'py_list: "[" (py_any (", " py_any)*)? "]"',
    'py_dict: "{" (py_key ": " py_any (", " py_key ": " py_any)*)? "}"',
    "py_key: py_string | py_quoted",
)
_LIMITS = frozenset({"pattern", "format", "minLength", "maxLength"})
"""Keywords of a schema that limit a string."""


def arguments_rule(schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
    """Return the right side of the Lark rule of a Python call behind its `(`: its arguments and the `)`.

    # weather(city="Paris", days=3), days optional: tool_0_0 (", " tool_0_1)? ")"

    Arguments are in the order of `schema`. An enum is enforced, and so is the schema of a value with one simple type.
    For an array, an object or a value with several types, only the kinds of literals are enforced. `label`: prefix of
    the names of rules and schemas that are added to `grammar`.
    """
    for rule in _SHARED:
        grammar.share(rule)
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties:
        if schema.get("additionalProperties", True) is False:
            return '")"'
        pair = r'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" py_any'
        return f'({pair} (", " {pair})*)? ")"'
    sequence = properties_in_order(schema, label, grammar, "=", '", "', _value)
    return f'{sequence} ")"'


def _value(schema: Any, rule: str, grammar: LarkGrammar) -> str:
    choices = choices_of(schema)
    if choices:
        return "(" + " | ".join(as_json(as_literal(choice)) for choice in choices) + ")"
    ways = list[str]()
    for kind in sorted(types_of(schema)):
        if kind == STRING and not _LIMITS & set(schema):
            ways.append("py_string | py_quoted")
        elif kind in (STRING, "integer", "number"):
            ways.append(_enforced(kind, schema, rule, grammar))
        elif kind == "array":
            ways.append("py_list")
        elif kind == "object":
            ways.append("py_dict")
        else:
            ways.append(PYTHON_WORDS[kind])
    return "(" + " | ".join(ways or ["py_any"]) + ")"


def _enforced(kind: str, schema: Any, rule: str, grammar: LarkGrammar) -> str:
    # Strings and numbers are written as in JSON, so JSON's grammar serves.
    if schema.get("type") != kind:
        return {STRING: "py_string"}.get(kind, "py_number")
    return grammar.schema(f"{rule}_{kind}", schema)


def as_literal(value: Any) -> str:
    """Return a JSON value as a Python literal with strings in double quotes, as templates write them."""
    if isinstance(value, str):
        return as_json(value)
    if isinstance(value, list):
        return f"[{', '.join(as_literal(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = [f"{as_json(str(key))}: {as_literal(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    return repr(value)
