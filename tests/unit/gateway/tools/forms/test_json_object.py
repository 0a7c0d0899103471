"""Calls that are one JSON object."""

import pytest

from gateway.tools.call_families import JSON, LLAMA3, CallFamily
from gateway.tools.parts import Content
from gateway.tools.reader import CallReader
from tests.unit.gateway.tools.answers import SCHEMAS, one, told


def test_a_call_in_another_order_or_with_its_arguments_in_a_string() -> None:
    for text in ('{"arguments": {"a":1}, "name": "weather"}', r'{"name": "weather", "arguments": "{\"a\":1}"}'):
        assert one(JSON, text) == (None, "", [("weather", '{"a":1}')])
    assert one(LLAMA3, '<|python_tag|>{"type": "function", "name": "weather", "parameters": {}}')[2] == [
        ("weather", "{}")
    ]


@pytest.mark.parametrize(
    "text", ['{"answer"', '{"name": "other"', "{ no JSON", '[{"id"'], ids=["key", "name", "no key", "in a list"]
)
@pytest.mark.parametrize("family", [LLAMA3, JSON], ids=lambda family: family.name)
def test_json_that_can_be_no_call_is_told_as_it_comes(family: CallFamily, text: str) -> None:
    reader = CallReader(family, SCHEMAS, None, False, None)
    assert told([part for char in text for part in reader.push(char)]) == (text, "", [])
    assert reader.push(': "more') == [Content(': "more', len(text) + 7)]
