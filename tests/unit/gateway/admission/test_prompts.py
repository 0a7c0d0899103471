"""Texts that take long to render and to tokenise leave the event loop alone, wherever in a request they are."""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.admission.prompts import INLINE_CHARS, Chat
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_body
from outrider.wire.errors import ContextExceeded, InvalidRequest
from tests.rendering import inline_template
from tests.unit.gateway.admission.asked import FACTS, TOKENIZER, built, predicting, reader_of

HELLO = {"role": "user", "content": "hello"}
LONG = "ab " * INLINE_CHARS
UNFIT = "ab " * 30_000
"""Of more characters than 2048 tokens stand for."""
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
    monkeypatch.setattr(TOKENIZER, "template", inline_template(TEMPLATE))
    yield seen


@pytest.mark.parametrize(
    ("body", "kind", "inline"),
    [
        ({"prompt": "hello"}, CompletionBody, True),
        ({"prompt": LONG}, CompletionBody, False),
        ({"prompt": ["hello"] * 100}, CompletionBody, True),
        ({"prompt": [LONG[: INLINE_CHARS // 2]] * 4}, CompletionBody, False),
        ({"prompt": "hello", "prediction": {"type": "content", "content": LONG}}, CompletionBody, False),
        ({"messages": [HELLO]}, ChatBody, True),
        ({"messages": [HELLO | {"content": LONG}]}, ChatBody, False),
        ({"messages": [HELLO | {"name": LONG}]}, ChatBody, False),
        ({"messages": [HELLO], "chat_template_kwargs": {"note": LONG}}, ChatBody, False),
        ({"messages": [HELLO], "chat_template_kwargs": {"notes": [[[{"a": LONG}]]]}}, ChatBody, False),
    ],
)
async def test_long_texts_are_tokenised_on_a_thread(
    threads: set[int], body: dict[str, object], kind: type[ChatBody] | type[CompletionBody], inline: bool
) -> None:
    demand = parse_body(kind, body).unchecked_request("id")
    await built(demand)
    assert (threads == {threading.get_ident()}) is inline
    assert inline or threads


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"prompt": UNFIT}, CompletionBody), ({"messages": [HELLO | {"content": UNFIT}]}, ChatBody)],
    ids=["prompt", "chat"],
)
async def test_a_text_that_cannot_fit_is_refused_unread(
    threads: set[int], body: dict[str, object], kind: type[ChatBody] | type[CompletionBody]
) -> None:
    demand = parse_body(kind, body).unchecked_request("id")
    with pytest.raises(ContextExceeded, match=r"has (more than )?\d+ characters.*the context limit is 2048 tokens"):
        await built(demand)
    assert not threads


async def test_a_text_that_is_only_counted_may_be_longer_than_the_context() -> None:
    counting = reader_of(counts=True)
    assert len(await counting.encode("prompt", UNFIT, True)) > FACTS.context_limit
    chat = Chat((HELLO | {"content": UNFIT},))
    assert UNFIT in await counting.render("messages", chat)
    with pytest.raises(ContextExceeded, match="8 times the context limit are counted"):
        await counting.encode("prompt", UNFIT * 8, True)


async def test_of_a_prompt_that_is_cut_the_last_tokens_are_taken() -> None:
    expected = tuple(TOKENIZER.encode(UNFIT)[-7:])
    for kind, body in ((CompletionBody, {"prompt": UNFIT}), (ChatBody, {"messages": [HELLO | {"content": UNFIT}]})):
        parsed: Any = parse_body(kind, {**body, "truncate_prompt_tokens": 7})
        (request,) = await built(parsed.unchecked_request("id"))
        assert len(request.prompt_ids) == 7
        assert request.prompt_ids == expected or kind is ChatBody


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda text: parse_body(CompletionBody, {"prompt": text}), "prompt"),
        (lambda text: parse_body(ChatBody, {"messages": [{"role": "user", "content": text}]}), "messages"),
        (lambda text: parse_body(CompletionBody, {"prompt": "a", "bad_words": [text]}), "bad_words"),
        (lambda text: predicting(text), "prediction.content"),
    ],
)
async def test_a_text_that_needs_a_token_beyond_the_rows_is_refused_by_that_token(body: Any, name: str) -> None:
    last = max(range(TOKENIZER.vocab_size), key=lambda each: (TOKENIZER.token_text(each).isalpha(), each))
    demand = body(TOKENIZER.token_text(last).strip())
    demand = demand if isinstance(demand, UncheckedRequest) else demand.unchecked_request("r-1")
    facts = dataclasses.replace(FACTS, vocab_size=last)
    with pytest.raises(InvalidRequest, match=rf"^{name} needs the token '.*' \({last}\), .* up to {last - 1} alone"):
        await built(demand, facts=facts)


async def test_without_a_template_chats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "template", None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await built(parse_body(ChatBody, {"messages": [HELLO]}).unchecked_request("id"))


async def test_an_answer_may_go_on_with_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for each in messages %}<{{ each.role }}>{{ each.content | trim }}</s>{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "template", inline_template(source))
    asked = {"messages": [HELLO, {"role": "assistant", "content": "s "}], "continue_final_message": True}
    demand = parse_body(ChatBody, {**asked, "add_generation_prompt": False}).unchecked_request("id")
    (request,) = await built(demand)
    assert TOKENIZER.decode(request.prompt_ids) == "<user>hello</s><assistant>s "
    monkeypatch.setattr(TOKENIZER, "template", inline_template("{{ messages[0].content }}"))
    with pytest.raises(InvalidRequest, match="does not show the text of the last message"):
        await built(demand)
    for wrong in (asked, {"messages": [HELLO], "continue_final_message": True, "add_generation_prompt": False}):
        with pytest.raises(InvalidRequest, match="needs add_generation_prompt to be false and a last message of the"):
            parse_body(ChatBody, wrong).unchecked_request("id")


@pytest.mark.parametrize("given", [None, True, False])
async def test_the_tokenizers_own_tokens_are_added_to_texts_and_where_requested(
    monkeypatch: pytest.MonkeyPatch, given: bool | None
) -> None:
    encode, added = TOKENIZER.encode, []

    def told(text: str, add_special_tokens: bool = True) -> list[int]:
        if text:  # else what is predicted
            added.append(add_special_tokens)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", told)
    for body, asked in ((CompletionBody, {"prompt": "hello"}), (ChatBody, {"messages": [HELLO]})):
        parsed: Any = parse_body(body, {**asked, "add_special_tokens": given})
        await built(parsed.unchecked_request("id"))
    assert added == [given is not False, given is True]
