"""The family of a model's calls is that of its chat template."""

from __future__ import annotations

import json

import pytest

from gateway.tools.call_families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    STEP3,
    CallFamily,
    family_of,
)
from gateway.tools.reasoning import THINK, reasoning_family
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
    ],
    ids=["step3", "harmony with code", "harmony without a constraint"],
)
def test_texts_that_models_write_are_read(family: CallFamily, text: str) -> None:
    content, _, ((name, arguments),) = one(family, text)
    assert (content, name, json.loads(arguments)) == (None, "weather", {"city": "Oslo"})
