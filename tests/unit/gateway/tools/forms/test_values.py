"""Values that are written as plain text have the type that the schema says."""

from typing import Any

import pytest

from gateway.tools.forms.values import is_text, parameter_schema, string_inside, types_of, value_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, {"integer", "null"}),
        (
            {"enum": ["a", 1, 1.5, True, None, [], {}]},
            {*("string", "integer", "number", "boolean", "null"), "array", "object"},
        ),
        ({"const": False, "enum": ["a"]}, {"boolean"}),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types
    assert is_text(schema) is (types in ({"string"}, set()))


@pytest.mark.parametrize(
    ("text", "types", "json"),
    [
        (" 3 ", ["integer"], "3"),
        ("3", ["number"], "3"),
        ("3.0", ["integer"], "3"),
        ("3.5", ["integer"], '"3.5"'),
        ("3", ["string"], '"3"'),
        ("['a', True]", ["array"], '["a", true]'),
        ("{'a': (1,)}", ["object"], '{"a": [1]}'),
        ("{1, 2}", ["array"], '"{1, 2}"'),
        ("f()", ["array"], '"f()"'),
        ("3", ["string", "integer"], "3"),
        ("0x10", ["string", "integer"], '"0x10"'),
        ("1_000", ["string", "integer"], '"1_000"'),
        ("5 # five", ["string", "integer"], '"5 # five"'),
        ("True", ["boolean"], "true"),
        ("None", ["null", "string"], "null"),
        ("None", ["string"], '"None"'),
        ('"a"', ["array"], r'"\"a\""'),
        (' ["a"]', ["array"], '["a"]'),
        ("[1", ["array"], '"[1"'),
    ],
)
def test_text_is_what_the_schema_allows_or_a_string(text: str, types: list[str], json: str) -> None:
    assert value_of(text, {"type": types}) == json


def test_a_parameter_that_the_tool_does_not_name_may_be_anything() -> None:
    assert parameter_schema({"properties": {"a": {"type": "null"}}}, "a") == {"type": "null"}
    assert parameter_schema({"properties": {}}, "a") == parameter_schema({}, "a") == {}


def test_text_inside_a_json_string_is_escaped() -> None:
    assert string_inside('é "a"\n') == r"é \"a\"\n"
