"""Grammars of outputs with tools, as a request of the demo pair's makes them."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import FAMILIES, HERMES, CallFamily
from gateway.tools.cursor import MARKER
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import Tool, ToolOffer
from gateway.tools.reading import Reading, ReasoningBudget, grammar_request, reading_of
from gateway.tools.tool_grammar import tool_grammar
from tests.rendering import inline_template

DEMO = Path(__file__).parents[4] / "models/demo/target"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "The weather.", SCHEMA, strict=True)
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
SOURCE = "{{ tools }}"
"""A template that takes tools. The family is named beside it."""


@cache
def tokenizer_of(source: str, control: bool = False, parser: str = "hermes") -> Tokenizer:
    """The demo pair's. control: markers are tokens: special ones, and beside them one that is not, as Qwen has."""
    data = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if control:
        markers = {marker for family in FAMILIES for text in family.texts for marker in MARKER.findall(text)}
        markers |= {"<think>", "</think>"}
        markers = {marker for marker in markers if "NAME" not in marker and "KEY" not in marker}
        plain = {"<tool_call>", "</tool_call>", "[ARGS]"}
        data.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in sorted(markers - plain)])
        data.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in sorted(plain)])
    tokenizer = Tokenizer(data.to_str(), {}, inline_template(source))
    tokenizer.tool_call_parser = parser
    return tokenizer


@cache
def guide_of(control: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer_of("", control)._tokenizer.to_str())


def planned(
    offer: ToolOffer,
    source: str = SOURCE,
    control: bool = False,
    prompt: str = "",
    answer: str = "",
    family: CallFamily = HERMES,
    budget: ReasoningBudget | None = None,
) -> tuple[Reading | None, str]:
    tokenizer = tokenizer_of(source, control, family.name)
    reading = reading_of(offer, tokenizer, prompt, budget)
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
