"""Calls and reasoning are found in an answer's text by what it says, never by how it was cut into pieces."""

from __future__ import annotations

from typing import Any

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
)
from gateway.tools.parts import Content
from gateway.tools.reader import MAX_GAP, CallReader
from tests.unit.gateway.tools.answers import arguments, read, told, written

FAMILIES = [HERMES, MISTRAL, MISTRAL_SPACED, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V31, LLAMA3, JSON]
NAMES = frozenset({"weather", "add-2"})
MARKS = ("<think>", "</think>")
Call = tuple[str, str]


def one(family: CallFamily | None, text: str, **options: Any) -> tuple[str | None, str, list[Call]]:
    return told(read(family, [text], **options))


calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)
NOISE = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ", ", "; ", "\n", " ", '"', "\\", "text"),
    *('{"name": "weather", "arguments": ', '{"name": "none", "arguments": ', '{"a": 1}', '{"arguments": {}, "name": '),
    *("<think>", "</think>", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *('"add-2"', "weather", "function", "```json", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "[ARGS]"),
]


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(NOISE), max_size=24).map("".join),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_no_text_reads_otherwise_by_the_character_and_none_is_lost(
    family: CallFamily, text: str, reasons: bool, is_cut: bool, max_calls: int | None
) -> None:
    whole = one(family, text, reasons=reasons, is_cut=is_cut, max_calls=max_calls)
    parts = read(family, list(text), reasons=reasons, is_cut=is_cut, max_calls=max_calls)
    assert told(parts) == whole
    assert all(text[: part.end].endswith(part.text) for part in parts if isinstance(part, Content))
    content, reasoning, found = whole
    if not found:
        kept = "".join(f"{reasoning}{content}".split())
        lost = "".join(text.split())
        for mark in MARKS if reasons else ():
            lost = lost if mark in kept else lost.replace(mark, "", 1)
        assert kept == lost or (reasons and len(kept) >= len(lost) - len("".join(MARKS)))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_cannot_be_read_is_text(family: CallFamily) -> None:
    for call in [("unknown", '{"a": 1}'), ("weather", '{"a": }'), ("weather", '{"a": 1')]:
        text = written(family, [call])
        assert one(family, text) == (text, "", [])
    assert one(family, "no call at all {}") == ("no call at all {}", "", [])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_call_at_the_limit_of_tokens_is_cut_and_none_that_only_stops(family: CallFamily) -> None:
    text = written(family, [("weather", '{"city": "Par')]).partition("Par")[0] + "Par"
    assert one(family, text, is_cut=True) == (None, "", [("weather", '{"city": "Par')])
    assert one(family, text) == (text, "", [])


def test_a_stream_whose_call_turns_out_to_be_none_tells_its_text() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}, oops}'
    parts = read(HERMES, [text[:60], text[60:]])
    assert told(parts) == (text, "", [])
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text


@pytest.mark.parametrize(
    "text", ['{"answer"', '{"name": "other"', "{ no JSON", '[{"id"'], ids=["key", "name", "no key", "in a list"]
)
@pytest.mark.parametrize("family", [LLAMA3, JSON], ids=lambda family: family.name)
def test_json_that_can_be_no_call_is_told_as_it_comes(family: CallFamily, text: str) -> None:
    reader = CallReader(family, NAMES, None, False, None)
    assert told([part for char in text for part in reader.push(char)]) == (text, "", [])
    assert reader.push(': "more') == [Content(': "more', len(text) + 7)]


@pytest.mark.parametrize("begin", ["", "text", "<think>", "<think>text", "<tool_call>", '<tool_call>{"name"'])
def test_white_space_is_held_back_up_to_a_bound_however_it_is_cut(begin: str) -> None:
    text = f"{begin}{' ' * (MAX_GAP + 44)}{written(HERMES, [('weather', '{}')])}"
    for family in (HERMES, JSON):
        reader = CallReader(family, NAMES, MARKS, False, None)
        parts = [part for char in text for part in reader.push(char)]
        if '"name"' not in begin:
            assert len(reader._buffer) <= MAX_GAP + len(begin)
        assert told(parts + reader.finish(False)) == one(family, text, reasons=True)
