"""Grammars of calls take what a family writes and its reader reads, and nothing else; templates take the messages."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.grammars import of_schema
from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer
from gateway.tools.families import MARKER, Family
from gateway.tools.grammar import MAX_CALLS, tool_grammar
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import Tool, ToolOffer, offer_of
from gateway.tools.reading import Reading, grammar_request, reading_of
from outrider.engine.sampling.grammar import Grammars, GrammarState
from outrider.wire.errors import InvalidRequest
from tests.rendering import inline_template
from tests.unit.test_tool_reader import FAMILIES, TEMPLATES, told, written

DEMO = Path(__file__).parents[2] / "models/demo/target"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "The weather.", SCHEMA, strict=True)
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
SOURCES = {
    "hermes": "{{ tools }}<tool_call>",
    "mistral": "{{ tools }}[TOOL_CALLS][",
    "mistral [ARGS]": "{{ tools }}[TOOL_CALLS] [ARGS]",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜>```json",
    "deepseek v3.1": "{{ tools }}<｜tool▁calls▁begin｜>",
    "llama3": "{{ tools }}<|python_tag|>",
    "json": "{{ tools }}",
}
ANSWERED = [family for family in FAMILIES if family.opening != "[TOOL_CALLS] ["]


@cache
def tokenizer_of(source: str, control: bool = False) -> Tokenizer:
    """The demo pair's. control: markers are tokens: special ones, and beside them one that is not, as Qwen has."""
    data = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if control:
        markers = {marker for family in FAMILIES for text in family.texts for marker in MARKER.findall(text)}
        markers |= {"<|python_tag|>", "<think>", "</think>"}
        plain = {"<tool_call>", "</tool_call>", "[ARGS]"}
        data.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in sorted(markers - plain)])
        data.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in sorted(plain)])
    return Tokenizer(data.to_str(), {}, inline_template(source))


@cache
def guide_of(control: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer_of("", control)._tokenizer.to_str())


def planned(
    offer: ToolOffer, source: str, control: bool = False, prompt: str = "", answer: str = ""
) -> tuple[Reading | None, str]:
    tokenizer = tokenizer_of(source, control)
    reading = reading_of(offer, tokenizer, prompt)
    request = None if reading is None else grammar_request(offer, reading, tokenizer, answer)
    if request is None:
        return reading, answer
    data = json.loads(json.dumps(dataclasses.asdict(request)))
    return reading, tool_grammar(ToolGrammarRequest.from_json(data))


def takes(grammar: str, text: str, control: bool = False) -> bool:
    """Whether the text is a whole answer to the grammar, in the tokens that the tokenizer makes of it."""
    matcher = LLMatcher(guide_of(control), grammar)
    ids = tokenizer_of("", control).encode(text)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_properties_come_in_their_order() -> None:
    def made(names: str) -> str:
        properties = {name: {"type": "integer"} for name in names}
        tools = [
            Tool(f"t{at}", parameters={"type": "object", "properties": properties | {f"p{at}": {}}}) for at in range(2)
        ]
        return planned(offer_of(tools, "required", None), SOURCES["hermes"])[1]

    assert made("ab") != made("ba")


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", ANSWERED, ids=lambda family: family.name)
def test_required_calls_are_what_the_family_writes(family: Family, control: bool) -> None:
    source = SOURCES[family.name]
    reading, grammar = planned(offer_of([WEATHER, ADD], "required", None), source, control)
    assert reading is not None and reading.family is family
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    assert takes(grammar, one, control) and takes(grammar, two, control)
    assert takes(grammar, written(family, [ROME] * MAX_CALLS), control)
    assert not takes(grammar, written(family, [ROME] * (MAX_CALLS + 1)), control)
    for wrong in ("", "text", f"text {one}", f"{one} text", one.replace("Rome", "Oslo"), one.replace("weather", "wet")):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "required", False), source, control)
    assert takes(grammar, one, control) and not takes(grammar, two, control)
    _, grammar = planned(offer_of([WEATHER, ADD], ("add-2",), None), source, control)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, one, control) and not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in ANSWERED if not each.bare], ids=lambda family: family.name)
def test_under_auto_text_is_free_and_strict_calls_are_bound(family: Family, control: bool) -> None:
    source = SOURCES[family.name]
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), source, control)
    calls = written(family, [ROME, ADDED])
    for text in ("", "Just\ntext. {", calls, f"Well,\n{calls}", written(family, [("add-2", '{"b": [null]}')])):
        assert takes(grammar, text, control), text
    for wrong in (calls.replace("Rome", "Oslo"), f"Well, {calls.replace('weather', 'wet')}"):
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), source, control)
    assert takes(grammar, f"Well, {written(family, [ADDED])}", control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("family", [each for each in ANSWERED if each.bare], ids=lambda family: family.name)
def test_under_auto_an_answer_that_begins_with_json_is_a_strict_call_where_calls_need_no_marker(
    family: Family, control: bool
) -> None:
    source = SOURCES[family.name]
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), source, control)
    one, two = written(family, [ROME]), written(family, [ROME, ADDED])
    texts = ["", " \n", "Just\ntext. {", f"Well,\n{one}", "[", "[1, {}]", "[[{}]]", " [see](there)", one, two]
    wrongs = ["{}", "\n{", "\x1c{", "\u3000{", " [ {", one.replace("Rome", "Oslo"), two.replace("weather", "wet")]
    if family.marker is not None:
        texts += [f"{family.marker}{two}", f"Well, {family.marker}{one}"]
        wrongs += [f"Well, {family.marker}{wrongs[-1]}", f"{wrongs[-2]}{family.marker}{one}"]
    for text in texts:
        assert takes(grammar, text, control), text
    for wrong in wrongs:
        assert not takes(grammar, wrong, control), wrong
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", False), source, control)
    assert takes(grammar, written(family, [ADDED]), control)
    assert not takes(grammar, written(family, [ADDED, ADDED]), control)
    _, grammar = planned(offer_of([WEATHER], "auto", None), source + "</think>", control, prompt="<think>")
    assert takes(grammar, f"hm</think>\n\n{one}", control) and takes(grammar, "hm</think>\n\ntext", control)
    assert not takes(grammar, "hm</think>\n\n{}", control)


@pytest.mark.parametrize("source", [SOURCES["json"], SOURCES["hermes"]])
def test_nothing_is_bound_under_auto_without_strict_tools(source: str) -> None:
    for parallel in (True, False):
        assert planned(offer_of([ADD], "auto", parallel), source)[1] == ""
    assert planned(offer_of([WEATHER], "none", None), source) == (None, "")


@pytest.mark.parametrize("family", ANSWERED, ids=lambda family: family.name)
def test_a_schema_of_answers_leaves_calls_or_such_an_answer(family: Family) -> None:
    answer = of_schema(
        {"properties": {"x": {"type": "null"}, "name": {"type": "string"}}, "required": ["x"]}, "", strict=False
    )
    _, grammar = planned(offer_of([WEATHER, ADD], "auto", None), SOURCES[family.name], answer=answer)
    assert takes(grammar, '{"x": null}') and takes(grammar, written(family, [ROME]))
    assert takes(grammar, written(family, [ROME, ADDED]))
    assert not takes(grammar, "text") and not takes(grammar, "")
    _, grammar = planned(offer_of([WEATHER], "required", None), SOURCES[family.name], answer=answer)
    assert not takes(grammar, '{"x": null}')


@pytest.mark.parametrize("control", [False, True], ids=["markers are text", "markers are tokens"])
def test_reasoning_comes_before_what_is_bound(control: bool) -> None:
    source = SOURCES["hermes"] + "</think>"
    calls = written(FAMILIES[0], [ROME])
    begun, free = "\nI <tool_cal?\n</think>\n\n", "<think>\nhm\n</think>"
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant <think>\n")
    assert takes(grammar, begun + calls, control) and takes(grammar, f"</think>{calls}", control)
    assert not takes(grammar, calls, control)
    _, grammar = planned(offer_of([WEATHER], "required", None), source, control, prompt="assistant\n")
    assert takes(grammar, calls, control) and takes(grammar, free + calls, control)
    _, grammar = planned(offer_of([WEATHER], "auto", None), source, control, prompt="<think>")
    assert takes(grammar, f"{begun}text", control) and takes(grammar, f"{begun}text {calls}", control)
    assert not takes(grammar, begun + calls.replace("Rome", "Oslo"), control)
    answer = of_schema({"type": "integer"}, "x", strict=False)
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
    answer = of_schema({"type": "integer"}, "x", strict=False)
    assert allows(ToolOffer(), answer, ended, "12") and not allows(ToolOffer(), answer, ended, "twelve")
    offer, called = offer_of([WEATHER], "auto", None), spelt(tokenizer, parts, "<tool_call>")
    call = written(FAMILIES[0], [ROME]).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert allows(offer, "", called, call) and not allows(offer, "", called, call.replace("Rome", "Oslo"))


@pytest.mark.parametrize("parts", SPELLINGS.values(), ids=SPELLINGS)
def test_a_mark_inside_a_window_of_drafts_binds_what_is_drafted_behind_it(parts: tuple[str, ...]) -> None:
    """The mask behind drafts is that of the same tokens committed, wherever the window begins: for target and draft."""
    data = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    data.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("so.</think>\n", "</think>")])
    tokenizer = Tokenizer(data.to_str(), {}, inline_template("</think>"))
    reading = reading_of(ToolOffer(), tokenizer, "<think>")
    assert reading is not None
    answer = of_schema(
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


@pytest.mark.parametrize(
    "text, begun",
    [("Hello", None), ("<think>\nx\n</think>\n\nHello", None), ("<think>\nfoo", True), ("", False)],
    ids=["content", "behind reasoning", "in reasoning", "nothing"],
)
def test_the_message_that_is_continued_says_whether_reasoning_goes_on(text: str, begun: bool | None) -> None:
    """begun: None = there is none any more."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    offer = parse_body(ChatBody, body).demand("id").prompts[0].tools
    answer = of_schema({"type": "integer"}, "x", strict=False)
    reading, grammar = planned(offer, "</think>", prompt=f"assistant\n{text}", answer=answer)
    assert (None if reading is None else reading.in_reasoning) is begun
    assert takes(grammar, "12") is (not begun) and takes(grammar, "hm</think>\n\n12") is (begun is True)
    assert takes(grammar, "<think>hm</think>12") is (begun is not None)


def test_what_is_strict_and_cannot_be_enforced_is_refused_by_its_place_and_else_any_object() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    strict = Tool("f", parameters={**odd, "additionalProperties": False}, strict=True)
    with pytest.raises(InvalidRequest) as caught:
        planned(offer_of([ADD, strict], "required", None), SOURCES["hermes"])
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
    _, grammar = planned(offer_of([Tool("f", parameters=odd)], "required", None), SOURCES["hermes"])
    assert takes(grammar, written(FAMILIES[0], [("f", '{"b": [1]}')]))


def test_markers_that_are_special_tokens_are_seen_by_the_reader() -> None:
    for source in (SOURCES["mistral"], SOURCES["deepseek"], SOURCES["mistral [ARGS]"]):
        tokenizer = tokenizer_of(source, True)
        reading, _ = planned(offer_of([WEATHER, ADD], "auto", None), source, True)
        assert reading is not None and reading.family is not None and reading.shown_ids
        calls = written(reading.family, [ROME, ADDED])
        ids = tokenizer.encode(f"née {calls}")
        detokenizer = Detokenizer(tokenizer, (), reading.shown_ids)
        reader, parts = reading.reader(), []
        for token_id in ids:
            parts += reader.push(detokenizer.push([token_id]).text_delta)
        parts += reader.push(detokenizer.finish()[0]) + reader.finish(False)
        assert told(parts) == ("née", "", [ROME, ADDED])
        hidden = Detokenizer(tokenizer, ())
        assert hidden.push(ids).text_delta + hidden.finish()[0] == tokenizer.decode(ids) != f"née {calls}"


# --- templates ---------------------------------------------------------------------------------------------------

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "A tool knows.",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in (ROME, ADDED)
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    {"role": "user", "content": "Thanks."},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
    }
]


@pytest.mark.parametrize("name", ["hermes", "reasoning", "llama3", "mistral", "deepseek", "json", "demo"])
@pytest.mark.parametrize("offered", [True, False])
async def test_messages_go_through_templates_as_in_transformers(name: str, offered: bool) -> None:
    """Arguments as objects, tools as they came, and content an empty text where the template shows the calls so."""
    from transformers.utils.chat_template_utils import render_jinja_template

    path = DEMO / "chat_template.jinja" if name == "demo" else TEMPLATES / f"{name}.jinja"
    source = path.read_text(encoding="utf-8")
    body = {"messages": MESSAGES, "reasoning_effort": "low", "tools": TOOLS if offered else []}
    chat = parse_body(ChatBody, body).demand("id").prompts[0]
    told = [tool.for_template() for tool in chat.tools.tools]
    text = await inline_template(source).render(chat.messages, True, chat.template_kwargs, told, max_chars=1 << 20)
    plain = json.loads(json.dumps(MESSAGES))
    plain[1]["content"] = None if name == "deepseek" else ""
    for call in plain[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    expected, _ = render_jinja_template(
        [plain],
        tools=TOOLS if offered else None,
        chat_template=source,
        add_generation_prompt=True,
        reasoning_effort="low",
    )
    assert text == expected[0]
    assert ('"city": "Rome"' in text) and ("The weather." in text) == offered


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{% for message in messages %}{{ message.content }}\n{% endfor %}", False),
        ("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}", True),
        (
            "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}",
            True,
        ),
        ("{{ raise_exception('This model judges pairs of messages.') }}", True),
    ],
)
def test_a_template_that_writes_the_text_alone_marks_no_turns(source: str, marks: bool) -> None:
    assert inline_template(source).marks_turns is marks


async def test_the_template_named_tool_use_is_taken_for_tools() -> None:
    template = inline_template("plain", tool_use="{{ tools[0].function.name }}")
    assert await template.render([], True, {}, max_chars=100) == "plain"
    assert await template.render([], True, {}, [ADD.for_template()], max_chars=100) == "add-2"
    assert template.takes_tools and not inline_template("{{ messages }} tools").takes_tools


def test_tools_need_a_template_that_takes_them() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no tools.*--chat-template") as caught:
        planned(offer_of([ADD], "auto", None), "{{ messages }}")
    assert caught.value.param == "tools"
