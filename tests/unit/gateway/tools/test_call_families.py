"""The family of a model's calls is that of its chat template."""

from __future__ import annotations

import pytest

from gateway.tools.call_families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    CallFamily,
    family_of,
)
from gateway.tools.reasoning import THINK, reasoning_family
from tests.unit.gateway.tools.answers import TEMPLATES


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
