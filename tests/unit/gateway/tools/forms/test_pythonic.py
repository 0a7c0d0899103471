"""Calls that are Python."""

import pytest

from gateway.tools.cursor import NotACall
from gateway.tools.forms.pythonic import Pythonic
from tests.unit.gateway.tools.forms.reading_one import call_of

FORM = Pythonic()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("weather()", "{}"),
        ("weather(city='Paris', days=3)", '{"city": "Paris", "days": 3}'),
        ("weather(days=3,)", '{"days": 3}'),
        ("weather(is_set=true, note=None)", '{"is_set": true, "note": null}'),
        ('weather(tags=[true, "true"], where={"x": null})', '{"tags": [true, "true"], "where": {"x": null}}'),
        ("weather(tags=['a', \"b)\"], where={'x': -1.5})", '{"tags": ["a", "b)"], "where": {"x": -1.5}}'),
        (r"""weather(note='it\'s\n\x41\q"')""", r'{"note": "it' + r"'s\nA\\q\"" + '"}'),
        ('weather(note="""two\n"lines" """)', r'{"note": "two\n\"lines\" "}'),
    ],
)
def test_python_becomes_json(text: str, arguments: str) -> None:
    assert call_of(FORM, text) == arguments


def test_what_is_quoted_has_the_type_of_the_schema() -> None:
    schema = {"properties": {"tags": {"type": "array"}, "is_set": {"type": "boolean"}, "city": {"type": "string"}}}
    text = """weather(tags="['a', 1]", is_set='True', city="3")"""
    assert call_of(FORM, text, schema) == '{"tags": ["a", 1], "is_set": true, "city": "3"}'


@pytest.mark.parametrize(
    "text",
    ["wet()", "weather", "weather(3)", "weather(days=)", "weather(days=f(1))", "weather(a='x", "weather(a=1 b=2)"],
)
def test_other_texts_are_no_call(text: str) -> None:
    with pytest.raises(NotACall):
        call_of(FORM, text)


def test_a_call_is_written_with_pythons_words() -> None:
    arguments = {"city": 'a "b"', "is_set": True, "note": None, "tags": [{"a": 1}]}
    written = FORM.write("weather", arguments, 0)
    assert written == r'weather(city="a \"b\"", is_set=True, note=None, tags=[{"a": 1}])'
