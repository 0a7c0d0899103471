"""The grammar of a Python call takes arguments of the schema in their order, and no others."""

from typing import Any

import pytest

from gateway.tools.call_families import BY_PARSER
from gateway.tools.offer import Tool, offer_of
from tests.unit.gateway.tools.plans import planned, takes


def grammar_of(schema: dict[str, Any]) -> str:
    tools = [Tool("f", parameters=schema, strict=False)]
    return planned(offer_of(tools, "required", False), family=BY_PARSER["pythonic"])[1]


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (
            {"properties": {"a": INTEGER, "b": {"enum": ["x", None]}}, "required": ["a"]},
            ["a=1", 'a=1, b="x"', "a=1, b=None"],
            ["", 'b="x"', 'b="x", a=1', "a=1, b=null", 'a="1"', "a=1, "],
        ),
        ({"properties": {"a": INTEGER, "b": INTEGER}}, ["", "a=1", "b=2", "a=1, b=2"], ["b=2, a=1", "c=1"]),
        (
            {"properties": {"a": {"enum": [["x", True], {"k": None}]}}, "required": ["a"]},
            ['a=["x", True]', 'a={"k": None}'],
            ["a=['x', True]", 'a=["x", true]', 'a="x"'],
        ),
        ({"properties": {}, "additionalProperties": False}, [""], ["a=1"]),
        ({"properties": {}, "additionalProperties": True}, ["", 'x=[1, True], y={"a": None}'], ["x=true", "3", "1x=2"]),
    ],
    ids=["required and optional", "all optional", "an enum of lists and objects", "none", "any"],
)
def test_arguments_of_a_schema(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    grammar = grammar_of({"type": "object", **schema})
    for arguments in taken:
        assert takes(grammar, f"[f({arguments})]"), arguments
    for arguments in refused:
        assert not takes(grammar, f"[f({arguments})]"), arguments
