"""Calls as Gemma writes them."""

import pytest
from jinja2 import Environment

from gateway.tools.call_families import GEMMA4
from gateway.tools.cursor import NotACall
from gateway.tools.forms.gemma import MAX_DEPTH, Gemma
from gateway.tools.offer import Tool, offer_of
from tests.unit.gateway.tools.forms.reading_one import call_of
from tests.unit.gateway.tools.plans import planned, takes

FORM = Gemma("<escape>")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:weather{}", "{}"),
        ("call:weather{city:<escape>a, }b<escape>,days:3}", '{"city": "a, }b", "days": 3}'),
        ("call:weather{<escape>the city<escape>:<escape>x<escape>}", '{"the city": "x"}'),
        ("call:weather{a:007,b:-0.50,c:1e2,d:00}", '{"a": 7, "b": -0.5, "c": 100.0, "d": 0}'),
        ("call:weather{a:True,b:none,c:null,d:plain words}", '{"a": true, "b": null, "c": null, "d": "plain words"}'),
        ("call:weather{a:[1,[],{b:2}]}", '{"a": [1, [], {"b": 2}]}'),
    ],
)
def test_what_gemma_writes_becomes_json(text: str, arguments: str) -> None:
    assert call_of(FORM, text) == arguments


def test_what_is_quoted_has_the_type_of_the_schema() -> None:
    schema = {"properties": {"days": {"type": "integer"}, "note": {"type": ["string", "null"]}}}
    text = "call:weather{days:<escape>3<escape>,note:<escape>4<escape>,more:None}"
    assert call_of(FORM, text, schema) == '{"days": 3, "note": "4", "more": null}'


@pytest.mark.parametrize(
    "text",
    [
        "weather{}",
        "call:wet{}",
        "call:weather{city:<escape>x}",
        "call:weather{a:1 ",
        "call:weather{a:[1}",
        "call:weather{a:" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
    ],
    ids=["no mark", "no tool", "open string", "open word", "open list", "deep"],
)
def test_other_texts_are_no_call(text: str) -> None:
    with pytest.raises(NotACall):
        call_of(FORM, text)


def test_a_call_is_written_with_its_strings_between_quotes() -> None:
    arguments = {"city": "Paris", "is_set": True, "tags": ["a", {"b": None}]}
    written = "call:weather{city:<escape>Paris<escape>,is_set:true,tags:[<escape>a<escape>,{b:null}]}"
    assert FORM.write("weather", arguments, 0) == written


def test_sorted_keys_are_in_the_order_of_jinjas_dictsort() -> None:
    arguments = {"userId": 2, "Zone": 3, "user_id": 1, "area": 4}
    pairs = Environment(autoescape=True).from_string(
        "{% for key, value in arguments | dictsort %}{{ key }}:{{ value }},{% endfor %}"
    )
    written = f"call:weather{{{pairs.render(arguments=arguments).removesuffix(',')}}}"
    assert GEMMA4.form.write("weather", arguments, 0) == written
    names = list(arguments)
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    offer = offer_of([Tool("weather", parameters=schema, strict=True)], "required", None)
    _, grammar = planned(offer, family=GEMMA4)
    assert takes(grammar, f"{GEMMA4.opening}{written}{GEMMA4.closing}")
