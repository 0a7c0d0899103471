"""Reasoning is split off."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from gateway.tools.call_families import (
    HERMES,
    CallFamily,
)
from gateway.tools.parts import Content, Reasoning
from tests.unit.gateway.tools.answers import arguments, read, told, written

NAMES = frozenset({"weather", "add-2"})
Call = tuple[str, str]


def one(family: CallFamily | None, text: str, **options: Any) -> tuple[str | None, str, list[Call]]:
    return told(read(family, [text], **options))


calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)


@pytest.mark.parametrize("begun", [True, False], ids=["begun by the prompt", "begun by the answer"])
def test_reasoning_is_split_off_and_calls_follow_it(begun: bool) -> None:
    thought = 'I could <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call> here.'
    text = ("" if begun else "<think>") + f"\n{thought}\n</think>\n\nNow: {written(HERMES, [('add-2', '{}')])}"
    expected = ("Now:", thought, [("add-2", "{}")])
    assert one(HERMES, text, reasons=True, begun=begun) == expected
    assert told(read(HERMES, list(text), reasons=True, begun=begun)) == expected


def test_answers_without_reasoning_and_reasoning_without_an_answer() -> None:
    assert one(None, " plain <thinking>\n", reasons=True) == (" plain <thinking>\n", "", [])
    assert one(None, "<think>\nhm, ", reasons=True, is_cut=True) == ("", "hm, ", [])
    assert read(None, ["a", " ", "b "]) == [Content("a", 1), Content(" ", 2), Content("b ", 4)]
    assert read(None, ["hm", "</thi", "nk>", "\n", "yes"], begun=True) == [Reasoning("hm"), Content("yes", 14)]
