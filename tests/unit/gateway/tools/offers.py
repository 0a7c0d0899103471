"""Tools that are offered, and what binds an answer that calls them."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import MARKER
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import ToolOffer
from gateway.tools.reading import Reading, grammar_request, reading_of
from gateway.tools.tool_grammar import tool_grammar
from tests.rendering import inline_template
from tests.unit.gateway.tools.test_call_families import FAMILIES

DEMO = Path(__file__).parents[4] / "models/demo/target"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SOURCES = {
    "hermes": "{{ tools }}<tool_call>",
    "mistral": "{{ tools }}[TOOL_CALLS][",
    "mistral [ARGS]": "{{ tools }}[TOOL_CALLS] [ARGS]",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜>```json",
    "deepseek v3.1": "{{ tools }}<｜tool▁calls▁begin｜>",
    "llama3": "{{ tools }}<|python_tag|>",
    "json": "{{ tools }}",
}


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
