"""What is bound of an answer, by what is offered and asked for."""

from __future__ import annotations

import pytest

from gateway.grammars import of_schema
from gateway.tools.call_families import CallFamily
from gateway.tools.offer import Tool, ToolOffer, offer_of
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.tools.answers import written
from tests.unit.gateway.tools.offers import SCHEMA, SOURCES, planned, takes
from tests.unit.gateway.tools.test_call_families import FAMILIES

WEATHER = Tool("weather", "The weather.", SCHEMA, strict=True)
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
ANSWERED = [family for family in FAMILIES if family.opening != "[TOOL_CALLS] ["]


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in ANSWERED if not each.bare], ids=lambda family: family.name)
def test_under_auto_text_is_free_and_strict_calls_are_bound(family: CallFamily, control: bool) -> None:
    source = SOURCES[family.name]
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), source, control)
    calls = written(family, [ROME, ADDED])
    for text in ("", "Just\ntext. {", calls, f"Well,\n{calls}", written(family, [("add-2", '{"b": [null]}')])):
        assert takes(grammar, text, control), text
    for wrong in (calls.replace("Rome", "Oslo"), f"Well, {calls.replace('weather', 'wet')}"):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), source, control)
    assert takes(grammar, f"Well, {written(family, [ADDED])}", control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("family", ANSWERED, ids=lambda family: family.name)
def test_a_schema_of_answers_leaves_calls_or_such_an_answer(family: CallFamily) -> None:
    answer = of_schema(
        {"properties": {"x": {"type": "null"}, "name": {"type": "string"}}, "required": ["x"]}, "", strict=False
    )
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), SOURCES[family.name], answer=answer)
    assert takes(grammar, '{"x": null}') and takes(grammar, written(family, [ROME]))
    assert takes(grammar, written(family, [ROME, ADDED]))
    assert not takes(grammar, "text") and not takes(grammar, "")
    _, grammar = planned(offer_of([WEATHER], "required", None), SOURCES[family.name], answer=answer)
    assert not takes(grammar, '{"x": null}')


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
def test_reasoning_comes_before_what_is_bound(control: bool) -> None:
    source = SOURCES["hermes"] + "</think>"
    calls = written(FAMILIES[0], [ROME])
    begun, free = "\nI <tool_cal?\n</think>\n\n", "<think>\nhm\n</think>"
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant <think>\n")
    assert takes(grammar, begun + calls, control) and takes(grammar, f"</think>{calls}", control)
    assert not takes(grammar, calls, control)
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant\n")
    assert takes(grammar, calls, control) and takes(grammar, free + calls, control)
    _, grammar = planned(offer_of([WEATHER], "auto", None), source, control, prompt="<think>")
    assert takes(grammar, f"{begun}text", control) and takes(grammar, f"{begun}text {calls}", control)
    assert not takes(grammar, begun + calls.replace("Rome", "Oslo"), control)
    answer = of_schema({"type": "integer"}, "x", strict=False)
    _, grammar = planned(ToolOffer(), source, control, prompt="<think>", answer=answer)
    assert takes(grammar, f"{begun}12", control) and not takes(grammar, f"{begun}twelve", control)
    ended = "assistant\n<think>\n\n</think>\n\n"
    assert planned(ToolOffer(), source, control, prompt=ended, answer=answer) == (None, answer)
    reading, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt=ended)
    assert reading is not None and reading.marks is None
    assert takes(grammar, calls, control) and not takes(grammar, free + calls, control)


def test_a_strict_tool_that_cannot_be_enforced_is_refused() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    strict = Tool("f", parameters={**odd, "additionalProperties": False}, strict=True)
    with pytest.raises(InvalidRequest) as caught:
        planned(offer_of([ADD, strict], "required", None), SOURCES["hermes"])
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
    _, grammar = planned(offer_of([Tool("f", parameters=odd)], "required", None), SOURCES["hermes"])
    assert takes(grammar, written(FAMILIES[0], [("f", '{"b": [1]}')]))


def test_tools_need_a_template_that_takes_them() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no tools.*--chat-template") as caught:
        planned(offer_of([ADD], "auto", None), "{{ messages }}")
    assert caught.value.param == "tools"
