"""Calls and reasoning are found in an answer's text by what it says, never by how it was cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.call_families import FAMILIES, HERMES, JSON, QWEN3_CODER, CallFamily
from gateway.tools.cursor import MAX_SPACE
from gateway.tools.parts import Content, Reasoning
from gateway.tools.reader import CallReader
from gateway.tools.reasoning import THINK
from tests.unit.gateway.tools.answers import SCHEMAS, TYPED, Call, objects, one, read, told, written

MARKS = THINK.marks


words = st.text(
    st.characters(codec="utf-8", exclude_characters="<>|[]`\r", exclude_categories=["Cs", "Cc"]), max_size=8
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": words,
        "days": st.integers(-(2**40), 2**40),
        "rate": st.floats(-1e6, 1e6).map(lambda number: round(number, 3)),
        "tags": st.lists(words, max_size=3),
        "is_set": st.booleans(),
        "where": st.dictionaries(st.sampled_from(["a", "b_1"]), words | st.integers(0, 9), max_size=2),
        "note": st.none() | st.just("two\nlines"),
    },
).map(lambda value: json.dumps(value, ensure_ascii=False))
calls = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), arguments), min_size=1, max_size=3)


@given(st.data(), st.sampled_from(FAMILIES), calls)
def test_what_a_family_writes_is_read_however_it_is_cut(
    data: st.DataObject, family: CallFamily, calls: list[Call]
) -> None:
    before = "" if family.is_bare else data.draw(st.sampled_from(["", "Let me see.", "a < b [x] "]))
    text = f"{before}\n{written(family, calls)}\n" if before else written(family, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, _, found = told(read(family, pieces, schemas=TYPED))
    assert objects(found) == objects(calls)
    assert (content or "") == before.rstrip()


EXAMPLE = [
    ("weather", '{"city": "Paris </x> \\"q\\"", "days": 3, "tags": ["a", "b"], "is_set": true}'),
    ("add-2", '{"rate": 1.5}'),
]


@pytest.mark.parametrize("has_end", [True, False], ids=["with the closing tag", "with no tag at all"])
def test_a_call_of_qwen3_coder_needs_no_opening_tag(has_end: bool) -> None:
    call, closing = written(QWEN3_CODER, EXAMPLE[1:]).removeprefix("<tool_call>\n"), "\n</tool_call>"
    if not has_end:
        call = call.removesuffix(closing)
    for text, count in (("Well. ", 1), ("a <function=x> b\n", 2)):
        whole = one(QWEN3_CODER, text + "\n".join([call] * count), schemas=TYPED)
        assert (whole[0], objects(whole[2])) == (text.rstrip(), objects(EXAMPLE[1:] * count))
        answer = text + "\n".join([call] * count)
        for pieces in (list(answer), *([answer[:cut], answer[cut:]] for cut in range(len(answer)))):
            assert told(read(QWEN3_CODER, pieces, schemas=TYPED)) == whole


NOISE = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ", ", "; ", "\n", " ", '"', "\\", "text"),
    *('{"name": "weather", "arguments": ', '{"name": "none", "arguments": ', '{"a": 1}', '{"arguments": {}, "name": '),
    *("<think>", "</think>", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *(
        "<function=weather>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_value>",
        "weather(",
        ")",
    ),
    *("<|channel|>", "<|message|>", "to=functions.weather", "call:weather{", "<escape>", 'city="x"', "<|call|>"),
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
    text = written(family, [("unknown", '{"a": 1}')])
    assert one(family, text) == (text, "", [])
    text = written(family, [("weather", '{"city": "Oslo"}')]).partition("Oslo")[0]
    assert one(family, text) == (text, "", [])
    assert one(family, "no call at all {}") == ("no call at all {}", "", [])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_call_at_the_limit_of_tokens_is_cut_and_none_that_only_stops(family: CallFamily) -> None:
    text = written(family, [("weather", '{"city": "Paris"}')]).partition("Par")[0] + "Par"
    content, _, found = one(family, text, is_cut=True)
    assert content is None and [name for name, _ in found] == ["weather"]
    assert found[0][1].replace(" ", "") == '{"city":"Par'
    assert one(family, text) == (text, "", [])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_output_may_end_within_the_text_that_ends_calls(family: CallFamily) -> None:
    """A token of that text may be the one that ends the output, which is no part of its text."""
    calls = [("weather", '{"city": "Rome"}'), ("add-2", '{"a": "b"}')]
    text = written(family, calls)
    for num_missing in range(1, len(family.closing.strip()) + 1):
        content, _, found = one(family, text[:-num_missing])
        assert content is None and objects(found) == objects(calls), text[:-num_missing]


def test_one_call_alone_where_only_one_is_wanted() -> None:
    text = written(HERMES, [("weather", "{}"), ("add-2", "{}")])
    content, _, found = one(HERMES, text, max_calls=1)
    assert (content, found) == (None, [("weather", "{}")])


def test_a_marker_that_announces_nothing_is_text_as_soon_as_that_is_sure() -> None:
    reader = CallReader(HERMES, SCHEMAS, None, False, None)
    assert reader.push("<tool_call>") == [] and reader.push(" " * MAX_SPACE) == []
    assert reader.push("x") == [Content("<tool_call>", 11), Content(" " * MAX_SPACE + "x", 12 + MAX_SPACE)]


@pytest.mark.parametrize("begin", ["", "text", "<think>", "<think>text", "<tool_call>", '<tool_call>{"name"'])
def test_white_space_is_held_back_up_to_a_bound_however_it_is_cut(begin: str) -> None:
    text = f"{begin}{' ' * (MAX_SPACE + 44)}{written(HERMES, [('weather', '{}')])}"
    for family in (HERMES, JSON):
        reader = CallReader(family, SCHEMAS, THINK, False, None)
        parts = [part for char in text for part in reader.push(char)]
        if '"name"' not in begin:
            assert len(reader._cursor.text) <= MAX_SPACE + len(begin)
        assert told(parts + reader.finish(False)) == one(family, text, reasons=True)


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
