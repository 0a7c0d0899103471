"""The structure of a JSON Schema: keywords that contain schemas, paths in a schema, and references. Pure.

`gateway.json_schemas` uses it to check a caller's schema, `gateway.grammars` to find the path to an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

MAX_DEPTH = 32
"""Maximal depth of nested schemas, of nested lists and objects in a const, and of schemas joined by references. It is
needed because all functions that read a schema recurse."""
SINGLE = ("items", "additionalProperties")
"""Keywords whose value is one schema."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""
DEFINITIONS = ("$defs", "definitions")

Schema = dict[str, Any] | bool
SchemaPath = tuple[str | int, ...]
"""SchemaPath of a part in a schema: the keys and indices that lead to it from the top."""


class SchemaRefused(Exception):
    """A schema is refused. `reason` says why, and `path` is the path in the schema that causes it."""

    def __init__(self, reason: str, *path: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


class PatternRefused(SchemaRefused):
    """Refusal of a schema because of the `pattern` of a string."""


def children(schema: Schema) -> Iterator[tuple[SchemaPath, Schema]]:
    """Yield each schema directly within `schema`, with the keys and indices that lead to it; definitions come first.

    # {"anyOf": [a, b], "$defs": {"n": c}}: (("$defs", "n"), c), (("anyOf", 0), a), (("anyOf", 1), b)
    """
    if isinstance(schema, bool):
        return
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in DEFINITIONS):
        if key in SINGLE:
            yield (key,), value
        elif key in LISTS:
            for index, child in enumerate(value):
                yield (key, index), child
        elif key in MAPS:
            for name, child in value.items():
                yield (key, name), child


def pointer(path: SchemaPath) -> str:
    """Return a path as a JSON pointer, escaped as in a `$ref`.

    # ("properties", "a/b", "anyOf", 0): "/properties/a~1b/anyOf/0"
    """
    text = ""
    for key in path:
        escaped = str(key).replace("~", "~0").replace("/", "~1")
        text += f"/{quote(escaped)}"
    return text


def moved(schema: Schema, to: str) -> Schema:
    """Return the schema with its references changed so that it can stand at the JSON pointer `to` of another schema.

    # {"$ref": "#/$defs/a"} moved to "/$defs/whole" is {"$ref": "#/$defs/whole/$defs/a"}
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if "$ref" in result:
        result["$ref"] = f"#{to}{result['$ref'].removeprefix('#')}"
    for key, value in schema.items():
        if key in SINGLE:
            result[key] = moved(value, to)
        elif key in LISTS:
            result[key] = [moved(child, to) for child in value]
        elif key in MAPS:
            result[key] = {name: moved(child, to) for name, child in value.items()}
    return result
