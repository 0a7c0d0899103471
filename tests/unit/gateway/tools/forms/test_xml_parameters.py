"""Calls whose parameters stand between tags."""

import json

import pytest

from gateway.tools.call_families import FAMILIES, CallFamily
from gateway.tools.cursor import NotACall
from gateway.tools.forms.xml_parameters import XmlParameters
from tests.unit.gateway.tools.answers import TYPED, one, written
from tests.unit.gateway.tools.forms.reading_one import call_of


@pytest.mark.parametrize("family", [each for each in FAMILIES if isinstance(each.form, XmlParameters)], ids=str)
def test_a_value_may_hold_the_tag_that_ends_values_and_has_the_type_of_the_schema(family: CallFamily) -> None:
    form = family.form
    assert isinstance(form, XmlParameters)
    tag = form.parameter_tail.strip()
    arguments = {"city": f"a {tag} b\n{tag}", "days": 3, "rate": 2, "is_set": False, "note": None, "tags": ["<x>"]}
    (call,) = read_calls = one(family, written(family, [("weather", json.dumps(arguments))]), schemas=TYPED)[2]
    assert json.loads(call[1]) == arguments, read_calls
    text = written(family, [("weather", '{"days": "three", "city": "3", "other": "x"}')])
    assert json.loads(one(family, text, schemas=TYPED)[2][0][1]) == {"days": "three", "city": "3", "other": "x"}


QWEN = XmlParameters("<function=NAME>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>", has_lines=True)


@pytest.mark.parametrize(
    "text",
    [
        "<function=wet></function>",
        "<function=weather><parameter=city>Paris</parameter>",
        "<function=weather>Paris</function>",
        "<parameter=city>Paris</parameter></function>",
    ],
    ids=["no tool", "no end", "no parameter", "no start"],
)
def test_other_texts_are_no_call(text: str) -> None:
    with pytest.raises(NotACall):
        call_of(QWEN, text)


def test_only_one_line_break_on_each_side_is_none_of_the_value() -> None:
    text = "<function=weather>\n<parameter=city>\n\n Paris\r\n\n</parameter>\n</function>"
    assert json.loads(call_of(QWEN, text)) == {"city": "\n Paris\r\n"}
