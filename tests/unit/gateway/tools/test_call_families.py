"""How a family of models writes calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.call_families import (
    DEEPSEEK,
    DEEPSEEK_V31,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    CallFamily,
    family_of,
    reasoning_marks,
)
from tests.unit.gateway.tools.answers import arguments, read, told, written

TEMPLATES = Path(__file__).parents[3] / "data/templates"
FAMILIES = [HERMES, MISTRAL, MISTRAL_SPACED, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V31, LLAMA3, JSON]
NAMES = frozenset({"weather", "add-2"})
MARKS = ("<think>", "</think>")
Call = tuple[str, str]
calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)


@given(st.data(), st.sampled_from(FAMILIES), calls)
def test_what_a_family_writes_is_read_however_it_is_cut(
    data: st.DataObject, family: CallFamily, calls: list[Call]
) -> None:
    before = "" if family.bare else data.draw(st.sampled_from(["", "Let me see.", "a < b [x] "]))
    text = f"{before}\n{written(family, calls)}\n" if before else written(family, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, _, found = told(read(family, pieces))
    assert found == calls
    assert (content or "") == before.rstrip()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("hermes", HERMES),
        ("reasoning", HERMES),
        ("mistral", MISTRAL_SPACED),
        ("deepseek", DEEPSEEK),
        ("llama3", LLAMA3),
        ("json", JSON),
    ],
)
def test_the_family_is_that_of_the_templates_markers(name: str, family: CallFamily) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert family_of(text) is family
    assert reasoning_marks(text) == (MARKS if name == "reasoning" else None)
    assert family_of("{{ tools }}[TOOL_CALLS]name[ARGS]") is MISTRAL_ARGS
    assert family_of("{{ tools }}[TOOL_CALLS][") is MISTRAL
    assert family_of("{{ tools }}<｜tool▁calls▁begin｜>") is DEEPSEEK_V31
