"""Marks in an answer, by their text and by their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.grammars import of_schema
from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer
from gateway.tools.offer import Tool, ToolOffer, offer_of
from gateway.tools.reading import grammar_request, reading_of
from gateway.tools.tool_grammar import tool_grammar
from outrider.engine.sampling.grammar_state import Grammars, GrammarState
from tests.rendering import inline_template
from tests.unit.gateway.tools.answers import told, written
from tests.unit.gateway.tools.offers import SCHEMA, SOURCES, planned, takes, tokenizer_of
from tests.unit.gateway.tools.test_call_families import FAMILIES

DEMO = Path(__file__).parents[4] / "models/demo/target"
WEATHER = Tool("weather", "The weather.", SCHEMA, strict=True)
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
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
