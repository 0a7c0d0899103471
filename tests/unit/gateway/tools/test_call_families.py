"""The family of a model's calls is that of its chat template."""

import json
import re

import pytest

from gateway.tools.call_families import (
    _OTHER_FORMS,
    APERTUS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    GLM47,
    HARMONY,
    HERMES,
    HUNYUAN,
    HY3,
    JSON,
    LFM2,
    LLAMA3,
    LLAMA4_JSON,
    MINIMAX_M1,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    MISTRAL_SPACED,
    PHI4,
    STEP3,
    CallFamily,
    UnknownFamily,
    family_of,
)
from gateway.tools.reasoning import ERNIE, THINK, reasoning_family
from gateway.tools.reasoning import HY3 as HY3_REASONING
from gateway.tools.reasoning import MINIMAX_M2 as MINIMAX_REASONING
from tests.unit.gateway.tools.answers import TEMPLATES, one


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("hermes", HERMES),
        ("reasoning", HERMES),
        ("mistral", MISTRAL_SPACED),
        ("deepseek", DEEPSEEK_V3),
        ("llama3", LLAMA3),
        ("json", JSON),
    ],
)
def test_the_family_is_that_of_the_templates_markers(name: str, family: CallFamily) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert family_of(text) is family
    found = reasoning_family(text)
    assert (found is THINK) if name == "reasoning" else (found is None)
    assert family_of("{{ tools }}[TOOL_CALLS]name[ARGS]") is MISTRAL_ARGS
    assert family_of("{{ tools }}[TOOL_CALLS][") is MISTRAL
    assert family_of("{{ tools }}<｜tool▁calls▁begin｜>") is DEEPSEEK_V31
    assert family_of("{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]") is MISTRAL_CALL_ID
    assert (
        family_of("<arg_key>x</arg_key>\n<arg_value>") is GLM and family_of("<arg_key></arg_key><arg_value>") is GLM47
    )
    assert family_of("<tool_calls>\n[") is HUNYUAN and family_of("<beginning_of_sentence><tool_calls>") is MINIMAX_M1
    assert family_of("<|header_start|><|python_start|>'\"parameters\": '") is LLAMA4_JSON
    assert family_of("<|tool|><|/tool|>") is PHI4 and family_of("<|tool_list_start|>") is LFM2
    assert family_of("{{ '<|tools_prefix|>' + '[' }}") is APERTUS
    hy3 = "{% set mark = ':opensource' %}{{ '</think{}>'.format(mark) ~ '<tool_calls{}>'.format(mark) }}"
    assert family_of(hy3) is HY3 and reasoning_family(hy3) is HY3_REASONING
    assert reasoning_family("<response></think>") is ERNIE
    assert reasoning_family("<response></think><minimax:tool_call>") is MINIMAX_REASONING


@pytest.mark.parametrize("tag", _OTHER_FORMS)
def test_a_form_that_has_texts_of_a_family_is_not_taken_for_it(tag: str) -> None:
    with pytest.raises(UnknownFamily, match=re.escape(tag)):
        family_of(f"<tool_call>{''.join(_OTHER_FORMS[tag])}")
    with pytest.raises(UnknownFamily, match=r"<\|function_call\|>"):
        family_of("<|function_call|>{")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            STEP3,
            '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
            '<steptml:parameter name="city">Oslo</steptml:parameter>\n'
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        ),
        (HARMONY, '<|channel|>commentary to=functions.weather code<|message|>{"city": "Oslo"}<|call|>'),
        (HARMONY, '<|channel|>analysis to=functions.weather json<|message|>{"city": "Oslo"}<|call|>'),
        (APERTUS, '<|tools_prefix|>[{"weather": {"city": "Oslo"}}]'),
        (APERTUS, '<|tools_prefix|> [\n  { "weather" : {"city": "Oslo"} }\n] <|tools_suffix|>'),
    ],
    ids=[
        "step3",
        "harmony with code",
        "harmony without a constraint",
        "apertus without its end",
        "apertus with white space",
    ],
)
def test_texts_that_models_write_are_read(family: CallFamily, text: str) -> None:
    content, _, ((name, arguments),) = one(family, text)
    assert (content, name, json.loads(arguments)) == (None, "weather", {"city": "Oslo"})
