"""How the outputs of a chat are read: with which family, markers and reasoning."""

from __future__ import annotations

import pytest

from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.grammars import create_schema_grammar
from gateway.rounds.detokenizer import Detokenizer
from gateway.tools.call_families import BY_PARSER
from gateway.tools.offer import offer_of
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.tools.answers import objects, told, written
from tests.unit.gateway.tools.plans import ADD, ADDED, ROME, SOURCE, WEATHER, planned, takes, tokenizer_of


@pytest.mark.parametrize(
    "text, begun",
    [("Hello", None), ("<think>\nx\n</think>\n\nHello", None), ("<think>\nfoo", True), ("", False)],
    ids=["content", "behind reasoning", "in reasoning", "nothing"],
)
def test_the_message_that_is_continued_says_whether_reasoning_goes_on(text: str, begun: bool | None) -> None:
    """begun: None = there is none any more."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    offer = parse_body(ChatBody, body).unchecked_request("id").prompts[0].tools
    answer = create_schema_grammar({"type": "integer"}, "x", strict=False)
    reading, grammar = planned(offer, "</think>", prompt=f"assistant\n{text}", answer=answer)
    assert (None if reading is None else reading.in_reasoning) is begun
    assert takes(grammar, "12") is (not begun) and takes(grammar, "hm</think>\n\n12") is (begun is True)
    assert takes(grammar, "<think>hm</think>12") is (begun is not None)


def test_markers_that_are_special_tokens_are_seen_by_the_reader() -> None:
    for name in ("mistral", "deepseek_v3", "mistral_args", "kimi_k2", "glm45", "gemma4", "olmo3"):
        family = BY_PARSER[name]
        tokenizer = tokenizer_of(SOURCE, True, name)
        reading, _ = planned(offer_of([WEATHER, ADD], "auto", None), control=True, family=family)
        assert reading is not None and reading.family is family and reading.shown_ids
        calls = written(family, [ROME, ADDED])
        ids = tokenizer.encode(f"née {calls}")
        detokenizer = Detokenizer(tokenizer, (), reading.shown_ids)
        reader, parts = reading.reader(), []
        for token_id in ids:
            parts += reader.push(detokenizer.push([token_id]).text_delta)
        parts += reader.push(detokenizer.finish()[0]) + reader.finish(False)
        content, _, found = told(parts)
        assert content == "née" and objects(found) == objects([ROME, ADDED])
        hidden = Detokenizer(tokenizer, ())
        assert hidden.push(ids).text_delta + hidden.finish()[0] == tokenizer.decode(ids) != f"née {calls}"


def test_tools_need_a_template_that_takes_them() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no tools.*--chat-template") as caught:
        planned(offer_of([ADD], "auto", None), "{{ messages }}")
    assert caught.value.param == "tools"
