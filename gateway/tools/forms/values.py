"""Values of parameters that are written as plain text: what a schema makes of them, and text as JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.tools.cursor import Parsing
from gateway.tools.forms.form import CallText
from gateway.tools.parts import Arguments

STRING = "string"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def types_of(schema: Any) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows. Empty if the schema does not restrict the type.

    # {"anyOf": [{"type": "integer"}, {"type": "null"}]}: integer, null; {"enum": ["a", 1]}: string, integer
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, Sequence):
        return frozenset(str(each) for each in kind)
    found = set[str]()
    for value in choices_of(schema):
        found.add(type_of(value))
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, ()):
            found |= types_of(part)
    return frozenset(found)


def choices_of(schema: Any) -> list[Any]:
    """Return the values that a schema lists with `const` or `enum`; an empty list if it has neither."""
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    return list(schema.get("enum", ()))


def type_of(value: Any) -> str:
    """Return the name of a value's JSON type, such as "integer" or "object"."""
    if isinstance(value, bool):
        return "boolean"
    for name, types in _TYPES.items():
        if isinstance(value, types):
            return name
    return STRING


def parameter_schema(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of the parameter `key`; an empty schema if there is none. `schema`: that of all arguments."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        return properties.get(key, {})
    return {}


def is_text(schema: Any) -> bool:
    """Return whether a value that a model wrote without quotes is a string, whatever it looks like.

    It is one if the schema allows only strings, or does not restrict the type.
    """
    return types_of(schema) <= {STRING}


def value_of(text: str, schema: Any) -> str:
    """Return the JSON of a value that a model wrote as plain text.

    A text that is JSON or a Python literal of a type that the schema names, other than string, gives that value. Every
    other text gives a string, and so does each text if the schema names no type.
    """
    # "3" is 3 for an integer, "3" for a string; "true" is true for a boolean; "None" is null where null is allowed
    types = types_of(schema)
    stripped = text.strip()
    value = _parsed(stripped)
    if value is _NO_VALUE:
        return as_json(text)
    kind = type_of(value)
    is_number = kind == "integer" and "number" in types
    is_whole = kind == "number" and "integer" in types and isinstance(value, float) and value.is_integer()
    if kind != STRING and (kind in types or is_number):
        return as_json(value)
    if is_whole:
        return as_json(int(value))
    return as_json(text)


_NO_VALUE = object()


def _parsed(text: str) -> Any:
    """Return the value of a text in JSON, or as Python prints it: many templates do. _NO_VALUE for another text."""
    # "[1]" and "['a', True]" are lists; "0x10" and "1_000" are texts, which are no numbers in JSON
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    if not text.startswith(("[", "{")) and text not in ("True", "False", "None"):
        return _NO_VALUE
    try:
        value = ast.literal_eval(text)
        orjson.dumps(value)  # JSON has no sets, bytes or complex numbers
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NO_VALUE
    return value


def converted(call: CallText, parsing: Parsing[None], schema: Any) -> Parsing[None]:
    """Generator, for `yield from`: yield the arguments of `parsing`, which are one JSON string, with the schema's type.

    Some models write every value in quotes. If the schema allows strings, the pieces of the string are passed on. If
    not, the text in the quotes is yielded once it is complete, as the value that it stands for: 3 for "3".
    """
    # "3" in quotes is 3 for an integer
    types = types_of(schema)
    if not types or STRING in types:
        yield from parsing
        return
    text = ""
    for part in parsing:
        if part is None:
            yield None
        elif isinstance(part, Arguments):
            text += part.text
    yield call.arguments(value_of(json.loads(text), schema))


def as_json(value: Any) -> str:
    """Return the JSON text of a value, in which characters beyond ASCII are not escaped."""
    return json.dumps(value, ensure_ascii=False)


def string_inside(text: str) -> str:
    """Return the JSON string of a text without its quotes: a line break becomes `\\n`."""
    return as_json(text)[1:-1]
