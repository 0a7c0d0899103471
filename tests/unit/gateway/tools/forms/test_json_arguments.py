"""Calls whose name stands in front of their arguments."""

import pytest

from gateway.tools.cursor import NotACall
from gateway.tools.forms.json_arguments import JsonArguments
from tests.unit.gateway.tools.forms.reading_one import call_of

KIMI = JsonArguments("<call>functions.NAME:INDEX<arguments>", "<end>", others=("<call>NAME<arguments>",))
BARE = JsonArguments("NAME")
MISTRAL = JsonArguments("NAME[CALL_ID]INDEX[ARGS]", index="[a-zA-Z0-9]+")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (KIMI, '<call>functions.weather:12<arguments>{"a": "}"}<end>'),
        (KIMI, '<call> functions.weather:0 <arguments>\n{"a": "}"}'),
        (KIMI, '<call>weather<arguments>{"a": "}"}<end>'),
        (KIMI, '<call>weather code<arguments>{"a": "}"}<end>'),
        (BARE, 'weather{"a": "}"}'),
        (MISTRAL, 'weather[CALL_ID]aB3dE6789[ARGS]{"a": "}"}'),
        (MISTRAL, 'weather[ARGS]{"a": "}"}'),
    ],
    ids=[
        "numbered",
        "with white space and without its end",
        "the other text",
        "a word behind the name",
        "name and brace",
        "id",
        "without id",
    ],
)
def test_the_arguments_are_passed_on_as_they_are_written(form: JsonArguments, text: str) -> None:
    assert call_of(form, text) == '{"a": "}"}'


@pytest.mark.parametrize(
    "text",
    [
        "<call>functions.wet:0<arguments>{}<end>",
        "<call>functions.weather:0<arguments>[]<end>",
        '<call>functions.weather:0<arguments>{"a": }<end>',
        '<call>functions.weather:0<arguments>{"a": 1',
        "functions.weather:0<arguments>{}",
    ],
)
def test_other_texts_are_no_call(text: str) -> None:
    with pytest.raises(NotACall):
        call_of(KIMI, text)


def test_a_call_is_written_with_its_number() -> None:
    assert KIMI.write("weather", {"a": "é"}, 3) == '<call>functions.weather:3<arguments>{"a": "é"}<end>'
    assert KIMI.head("weather") == "<call>functions.weather:"
