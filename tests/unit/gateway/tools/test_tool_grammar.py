"""Grammars of calls take what a family writes and its reader reads, and nothing else; templates take the messages."""

from __future__ import annotations

import pytest

from gateway.tools.call_families import CallFamily
from gateway.tools.offer import Tool, offer_of
from gateway.tools.tool_grammar import MAX_CALLS
from tests.unit.gateway.tools.answers import written
from tests.unit.gateway.tools.offers import SCHEMA, SOURCES, planned, takes
from tests.unit.gateway.tools.test_call_families import FAMILIES

WEATHER = Tool("weather", "The weather.", SCHEMA, strict=True)
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
ANSWERED = [family for family in FAMILIES if family.opening != "[TOOL_CALLS] ["]


def test_properties_come_in_their_order() -> None:
    def made(names: str) -> str:
        properties = {name: {"type": "integer"} for name in names}
        tools = [
            Tool(f"t{at}", parameters={"type": "object", "properties": properties | {f"p{at}": {}}}) for at in range(2)
        ]
        return planned(offer_of(tools, "required", None), SOURCES["hermes"])[1]

    assert made("ab") != made("ba")


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", ANSWERED, ids=lambda family: family.name)
def test_required_calls_are_what_the_family_writes(family: CallFamily, control: bool) -> None:
    source = SOURCES[family.name]
    reading, grammar = planned(offer_of([WEATHER, ADD], "required", None), source, control)
    assert reading is not None and reading.family is family
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    assert takes(grammar, one, control) and takes(grammar, two, control)
    assert takes(grammar, written(family, [ROME] * MAX_CALLS), control)
    assert not takes(grammar, written(family, [ROME] * (MAX_CALLS + 1)), control)
    for wrong in ("", "text", f"text {one}", f"{one} text", one.replace("Rome", "Oslo"), one.replace("weather", "wet")):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "required", False), source, control)
    assert takes(grammar, one, control) and not takes(grammar, two, control)
    _, grammar = planned(offer_of([WEATHER, ADD], ("add-2",), None), source, control)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, one, control) and not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in ANSWERED if each.bare], ids=lambda family: family.name)
def test_under_auto_json_is_a_strict_call_without_markers(family: CallFamily, control: bool) -> None:
    source = SOURCES[family.name]
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), source, control)
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    texts = ["", " \n", "Just\ntext. {", f"Well,\n{one}", "[", "[1, {}]", "[[{}]]", " [see](there)", one, two]
    wrongs = ["{}", "\n{", "\x1c{", "\u3000{", " [ {", one.replace("Rome", "Oslo"), two.replace("weather", "wet")]
    if family.marker is not None:
        texts += [f"{family.marker}{two}", f"Well, {family.marker}{one}"]
        wrongs += [f"Well, {family.marker}{wrongs[-1]}", f"{wrongs[-2]}{family.marker}{one}"]
    for text in texts:
        assert takes(grammar, text, control), text
    for wrong in wrongs:
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), source, control)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)
    _, grammar = planned(offer_of([WEATHER], "auto", None), source + "</think>", control, prompt="<think>")
    assert takes(grammar, f"hm</think>\n\n{one}", control) and takes(grammar, "hm</think>\n\ntext", control)
    assert not takes(grammar, "hm</think>\n\n{}", control)
