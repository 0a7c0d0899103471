"""Grammars of calls take what a family writes and its reader reads, and nothing else; templates take the messages."""

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars import create_schema_grammar
from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import FAMILIES, HERMES, QWEN3_CODER, CallFamily
from gateway.tools.offer import Tool, ToolOffer, offer_of
from gateway.tools.reading import grammar_request, reading_of
from gateway.tools.tool_grammar import MAX_CALLS, tool_grammar
from outrider.engine.sampling.grammar_state import Grammars, GrammarState
from outrider.wire.errors import InvalidRequest
from tests.rendering import inline_template
from tests.unit.gateway.tools.answers import written
from tests.unit.gateway.tools.plans import ADD, ADDED, DEMO, ROME, SOURCE, WEATHER, planned, takes


def test_properties_come_in_their_order() -> None:
    def made(names: str) -> str:
        properties = {name: {"type": "integer"} for name in names}
        tools = [
            Tool(f"t{at}", parameters={"type": "object", "properties": properties | {f"p{at}": {}}}) for at in range(2)
        ]
        return planned(offer_of(tools, "required", None))[1]

    assert made("ab") != made("ba")


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_required_calls_are_what_the_family_writes(family: CallFamily, control: bool) -> None:
    reading, grammar = planned(offer_of([WEATHER, ADD], "required", None), control=control, family=family)
    assert reading is not None and reading.family is family
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    assert takes(grammar, one, control) and takes(grammar, two, control)
    assert takes(grammar, written(family, [ROME] * MAX_CALLS), control)
    assert not takes(grammar, written(family, [ROME] * (MAX_CALLS + 1)), control)
    for wrong in ("", "text", f"text {one}", f"{one} text", one.replace("Rome", "Oslo"), one.replace("weather", "wet")):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "required", False), control=control, family=family)
    assert takes(grammar, one, control) and not takes(grammar, two, control)
    _, grammar = planned(offer_of([WEATHER, ADD], ("add-2",), None), control=control, family=family)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, one, control) and not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in FAMILIES if not each.is_bare], ids=lambda family: family.name)
def test_under_auto_text_is_free_and_strict_calls_are_bound(family: CallFamily, control: bool) -> None:
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), control=control, family=family)
    calls = written(family, [ROME, ADDED])
    for text in ("", "Just\ntext. {", calls, f"Well,\n{calls}", written(family, [("add-2", '{"b": [null]}')])):
        assert takes(grammar, text, control), text
    for wrong in (calls.replace("Rome", "Oslo"), f"Well, {calls.replace('weather', 'wet')}"):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), control=control, family=family)
    assert takes(grammar, f"Well, {written(family, [ADDED])}", control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [HERMES, QWEN3_CODER], ids=lambda family: family.name)
def test_a_line_break_between_the_tags_of_two_calls_is_optional(family: CallFamily, control: bool) -> None:
    _, grammar = planned(offer_of([WEATHER], "required", None), control=control, family=family)
    two = written(family, [ROME, ROME])
    assert takes(grammar, two.replace("</tool_call>\n<tool_call>", "</tool_call><tool_call>"), control)


@pytest.mark.parametrize("family", [each for each in FAMILIES if len(each.markers) > 1], ids=lambda each: each.name)
def test_under_auto_calls_begin_with_the_first_marker_alone(family: CallFamily) -> None:
    _, grammar = planned(offer_of([WEATHER], "auto", None), family=family)
    for marker in family.markers[1:]:
        assert takes(grammar, f"Well, {marker[:-1]}") and not takes(grammar, f"Well, {marker}weather")


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in FAMILIES if each.is_bare], ids=lambda family: family.name)
def test_under_auto_an_answer_that_begins_with_json_is_a_strict_call_where_calls_need_no_marker(
    family: CallFamily, control: bool
) -> None:
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), control=control, family=family)
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    texts = ["", " \n", "Just\ntext. {", f"Well,\n{one}", "[", "[1, {}]", "[[{}]]", " [see](there)", one, two]
    wrongs = ["{}", "\n{", "\x1c{", "\u3000{", " [ {", one.replace("Rome", "Oslo"), two.replace("weather", "wet")]
    if family.lists_one:
        texts = [text for text in texts if not text.lstrip().startswith("[") or text in (one, two)]
        wrongs = ["[", "[1]", *wrongs[-2:]]
    if family.marker is not None:
        texts += [f"{family.marker}{two}", f"Well, {family.marker}{one}"]
        wrongs += [f"Well, {family.marker}{wrongs[-1]}", f"{wrongs[-2]}{family.marker}{one}"]
    for text in texts:
        assert takes(grammar, text, control), text
    for wrong in wrongs:
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), control=control, family=family)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)
    _, grammar = planned(
        offer_of([WEATHER], "auto", None), SOURCE + "</think>", control, prompt="<think>", family=family
    )
    assert takes(grammar, f"hm</think>\n\n{one}", control) and takes(grammar, "hm</think>\n\ntext", control)
    assert not takes(grammar, "hm</think>\n\n" + ("[1]" if family.lists_one else "{}"), control)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_schema_of_answers_leaves_calls_or_such_an_answer(family: CallFamily) -> None:
    answer = create_schema_grammar(
        {"properties": {"x": {"type": "null"}, "name": {"type": "string"}}, "required": ["x"]}, "", strict=False
    )
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), answer=answer, family=family)
    assert takes(grammar, '{"x": null}') and takes(grammar, written(family, [ROME]))
    assert takes(grammar, written(family, [ROME, ADDED]))
    assert not takes(grammar, "text") and not takes(grammar, "")
    _, grammar = planned(offer_of([WEATHER], "required", None), answer=answer, family=family)
    assert not takes(grammar, '{"x": null}')


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
def test_reasoning_comes_before_what_is_bound(control: bool) -> None:
    source = SOURCE + "</think>"
    calls = written(HERMES, [ROME])
    begun, free = "\nI <tool_cal?\n</think>\n\n", "<think>\nhm\n</think>"
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant <think>\n")
    assert takes(grammar, begun + calls, control) and takes(grammar, f"</think>{calls}", control)
    assert not takes(grammar, calls, control)
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant\n")
    assert takes(grammar, calls, control) and takes(grammar, free + calls, control)
    _, grammar = planned(offer_of([WEATHER], "auto", None), source, control, prompt="<think>")
    assert takes(grammar, f"{begun}text", control) and takes(grammar, f"{begun}text {calls}", control)
    assert not takes(grammar, begun + calls.replace("Rome", "Oslo"), control)
    answer = create_schema_grammar({"type": "integer"}, "x", strict=False)
    _, grammar = planned(ToolOffer(), source, control, prompt="<think>", answer=answer)
    assert takes(grammar, f"{begun}12", control) and not takes(grammar, f"{begun}twelve", control)
    ended = "assistant\n<think>\n\n</think>\n\n"
    assert planned(ToolOffer(), source, control, prompt=ended, answer=answer) == (None, answer)
    reading, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt=ended)
    assert reading is not None and reading.marks is None
    assert takes(grammar, calls, control) and not takes(grammar, free + calls, control)


SPELLINGS = {
    "its token": ("hm", "MARK", "\n"),
    "other tokens": ("hm", "MA", "RK", "\n"),
    "a token with text around it": ("hm", "so.MARK\n"),
}


def spelt(tokenizer: Tokenizer, parts: tuple[str, ...], mark: str) -> list[int]:
    half = len(mark) // 2
    names = [part.replace("MARK", mark).replace("MA", mark[:half]).replace("RK", mark[half:]) for part in parts]
    return [token_id for name in names for token_id in tokenizer.encode(name)]


@pytest.mark.parametrize("parts", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("special", [True, False], ids=["special", "not special"])
def test_a_mark_counts_by_its_text_for_reader_and_grammar_alike(parts: tuple[str, ...], special: bool) -> None:
    """What is told as content, or as a call, is what the grammar bound."""
    data = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for mark in ("</think>", "<tool_call>"):
        data.add_tokens([tokenizers.AddedToken(f"so.{mark}\n", normalized=False)])
        data.add_tokens([tokenizers.AddedToken(mark, special=special, normalized=False)])
    tokenizer = Tokenizer(data.to_str(), {}, inline_template("{{ tools }}<tool_call></think>"))
    guide = LLTokenizer(data.to_str())

    def allows(offer: ToolOffer, answer: str, begin: list[int], text: str) -> bool:
        reading = reading_of(offer, tokenizer, "<think>" if answer else "")
        assert reading is not None
        reader, detokenizer = reading.reader(), Detokenizer(tokenizer, (), reading.shown_ids)
        reader.push(detokenizer.push(begin).text_delta)
        assert not answer or reader.reasoning_end is not None
        request = grammar_request(offer, reading, tokenizer, answer)
        assert request is not None
        ids = [*begin, *tokenizer.encode(text)]
        return bool(LLMatcher(guide, tool_grammar(request)).try_consume_tokens(ids) == len(ids))

    ended = spelt(tokenizer, parts, "</think>")
    answer = create_schema_grammar({"type": "integer"}, "x", strict=False)
    assert allows(ToolOffer(), answer, ended, "12") and not allows(ToolOffer(), answer, ended, "twelve")
    offer, called = offer_of([WEATHER], "auto", None), spelt(tokenizer, parts, "<tool_call>")
    call = written(HERMES, [ROME]).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert allows(offer, "", called, call) and not allows(offer, "", called, call.replace("Rome", "Oslo"))


@pytest.mark.parametrize("parts", SPELLINGS.values(), ids=SPELLINGS)
def test_a_mark_inside_a_window_of_drafts_binds_what_is_drafted_behind_it(parts: tuple[str, ...]) -> None:
    """The mask behind drafts is that of the same tokens committed, wherever the window begins: for target and draft."""
    data = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    data.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("so.</think>\n", "</think>")])
    tokenizer = Tokenizer(data.to_str(), {}, inline_template("</think>"))
    reading = reading_of(ToolOffer(), tokenizer, "<think>")
    assert reading is not None
    answer = create_schema_grammar(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "", strict=False
    )
    request = grammar_request(ToolOffer(), reading, tokenizer, answer)
    assert request is not None
    ids = [*spelt(tokenizer, parts, "</think>"), *tokenizer.encode('{"a": 1}')]
    grammar = Grammars(data.to_str().encode(), tokenizer.vocab_size, (0,)).compile(tool_grammar(request))
    assert grammar is not None
    masks = []
    for end in range(len(ids) + 1):
        state = GrammarState(grammar)
        state.set_output(ids[:end])
        masks.append(state.allowed(()))
    assert all(mask is not None and mask[ids[end]] for end, mask in enumerate(masks[:-1]))
    for begin in range(len(ids)):
        state = GrammarState(grammar)
        state.set_output(ids[:begin])
        for end in range(begin, len(ids) + 1):
            assert np.array_equal(state.allowed(tuple(ids[begin:end])), masks[end])


def test_what_is_strict_and_cannot_be_enforced_is_refused_by_its_place_and_else_any_object() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    strict = Tool("f", parameters={**odd, "additionalProperties": False}, strict=True)
    with pytest.raises(InvalidRequest) as caught:
        planned(offer_of([ADD, strict], "required", None))
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
    _, grammar = planned(offer_of([Tool("f", parameters=odd)], "required", None))
    assert takes(grammar, written(HERMES, [("f", '{"b": [1]}')]))
