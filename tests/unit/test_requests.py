"""Texts that take long to render and to tokenise leave the event loop alone, wherever in a request they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gateway.admission.requests import INLINE_CHARS, build_requests
from gateway.api.schemas import ChatBody, CompletionBody, parse_body
from gateway.grammars import OutputFormat, of_regex
from gateway.tokenizer import ChatTemplate
from outrider.wire.errors import InvalidRequest
from tests.service.scripted_generator import ScriptedGenerator, config, demo_tokenizer

TOKENIZER = demo_tokenizer()
FACTS = ScriptedGenerator(TOKENIZER).models()[0]
HELLO = {"role": "user", "content": "hello"}
LONG = "ab " * INLINE_CHARS
TEMPLATE = "{{ note }}{{ notes }}{% for message in messages %}{{ message.name }}{{ message.content }}{% endfor %}"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Of which `TOKENIZER` was asked."""
    seen: set[int] = set()
    encode = TOKENIZER.encode

    def told(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.add(threading.get_ident())
        return encode(text[:100], add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", told)
    monkeypatch.setattr(TOKENIZER, "template", ChatTemplate(TEMPLATE, {}))
    yield seen


@pytest.mark.parametrize(
    ("body", "kind", "inline"),
    [
        ({"prompt": "hello"}, CompletionBody, True),
        ({"prompt": LONG}, CompletionBody, False),
        ({"messages": [HELLO]}, ChatBody, True),
        ({"messages": [HELLO | {"content": LONG}]}, ChatBody, False),
        ({"messages": [HELLO | {"name": LONG}]}, ChatBody, False),
        ({"messages": [HELLO], "chat_template_kwargs": {"note": LONG}}, ChatBody, False),
        ({"messages": [HELLO], "chat_template_kwargs": {"notes": [[[{"a": LONG}]]]}}, ChatBody, False),
    ],
    ids=["short", "prompt", "short chat", "content", "name", "kwargs", "kwargs, deep"],
)
async def test_long_texts_are_tokenised_on_a_thread(
    threads: set[int], body: dict[str, object], kind: type[ChatBody] | type[CompletionBody], inline: bool
) -> None:
    demand = parse_body(kind, body).demand("id")
    await build_requests(demand, FACTS, TOKENIZER, config())
    assert (threads == {threading.get_ident()}) is inline


async def test_a_grammar_is_compiled_on_a_thread_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    compiled = OutputFormat.grammar

    def told(output: OutputFormat) -> str:
        seen.append(threading.get_ident())
        return compiled(output)

    monkeypatch.setattr(OutputFormat, "grammar", told)
    demand = parse_body(CompletionBody, {"prompt": ["a", "b"], "n": 2, "structured_outputs": {"regex": "x+"}}).demand(
        "i"
    )
    requests = await build_requests(demand, FACTS, TOKENIZER, config())
    assert [request.params.grammar for request in requests] == [of_regex("x+", "p")] * 4
    assert len(seen) == 1 and threading.get_ident() not in seen


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({"num_draft_tokens": 17}, "num_draft_tokens is 17"), ({"tree": "4x2x1"}, "tree is 4x2x1, 20 nodes")],
)
async def test_an_operator_bounds_what_a_request_may_have_drafted(asked: dict[str, object], shown: str) -> None:
    demand = parse_body(CompletionBody, {"prompt": "x", "speculation": asked}).demand("id")
    await build_requests(demand, FACTS, TOKENIZER, config())
    with pytest.raises(InvalidRequest, match=rf"{shown}, .*at most 16 tokens \(max_draft_tokens\)"):
        await build_requests(demand, FACTS, TOKENIZER, config(max_draft_tokens=16))
