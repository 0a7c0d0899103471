"""The schemas within a schema, their places, and references that stay right when it is moved."""

import pytest

from gateway.json_schema_parts import SchemaPath, children, moved, pointer


def test_the_schemas_within_a_schema_with_definitions_first() -> None:
    a, b, c = {"type": "null"}, {"type": "string"}, {"type": "integer"}
    schema = {"anyOf": [a, b], "properties": {"x": True}, "items": False, "enum": [a], "$defs": {"n": c}}
    assert list(children(schema)) == [
        (("$defs", "n"), c),
        (("anyOf", 0), a),
        (("anyOf", 1), b),
        (("properties", "x"), True),
        (("items",), False),
    ]
    assert list(children(True)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("properties", "a/b", "anyOf", 0), "/properties/a~1b/anyOf/0"),
        (("$defs", "~ é"), "/%24defs/~0%20%C3%A9"),
    ],
)
def test_a_path_is_written_as_in_a_reference(path: SchemaPath, text: str) -> None:
    assert pointer(path) == text


def test_references_of_a_moved_schema_lead_to_where_it_is_now() -> None:
    schema = {
        "$defs": {"a": {"$ref": "#"}},
        "properties": {"$ref": {"$ref": "#/$defs/a"}},
        "anyOf": [{"items": {"$ref": "#/$defs/a"}}, True],
        "const": {"$ref": "#/text"},
    }
    assert moved(schema, "/$defs/whole") == {
        "$defs": {"a": {"$ref": "#/$defs/whole"}},
        "properties": {"$ref": {"$ref": "#/$defs/whole/$defs/a"}},
        "anyOf": [{"items": {"$ref": "#/$defs/whole/$defs/a"}}, True],
        "const": {"$ref": "#/text"},
    }
    assert schema["$defs"] == {"a": {"$ref": "#"}}, "the schema itself stays as it was"
