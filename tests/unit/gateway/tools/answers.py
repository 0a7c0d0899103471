"""Answers of every family, cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st

from gateway.api.openai_responses import message_of
from gateway.tools.call_families import (
    NAME,
    CallFamily,
)
from gateway.tools.parts import Part
from gateway.tools.reader import CallReader

NAMES = frozenset({"weather", "add-2"})
MARKS = ("<think>", "</think>")
Call = tuple[str, str]


def written(family: CallFamily, calls: Sequence[Call]) -> str:
    """The calls as the family writes them."""
    texts = [family.head.replace(NAME, name) + arguments + family.tail for name, arguments in calls]
    if family.bare and len(calls) == 1:
        return texts[0]
    return family.opening + family.between.join(texts) + family.closing


def read(
    family: CallFamily | None,
    pieces: Sequence[str],
    *,
    reasons: bool = False,
    begun: bool = False,
    max_calls: int | None = None,
    is_cut: bool = False,
) -> list[Part]:
    reader = CallReader(family, NAMES, MARKS if reasons or begun else None, begun, max_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish(is_cut)


def told(parts: Sequence[Part]) -> tuple[str | None, str, list[Call]]:
    """Content, reasoning and calls of a whole answer."""
    message = message_of(parts, lambda: "id")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content", ""), calls


arguments = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8), lambda each: st.lists(each, max_size=3), max_leaves=4
    ),
    max_size=3,
).map(lambda value: json.dumps(value, ensure_ascii=False))
calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)
