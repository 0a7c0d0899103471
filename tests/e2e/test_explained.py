"""What an answer of the real system says on request: its tokens' kinds, and what its rounds verified and refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.api.schemas.answers.openai import ChatChunk, ChatCompletion, Completion
from outrider.client import AsyncClient, DraftTokenKind, Speculation, TokenKind
from tests.stack import Stack

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"
CHAT = [{"role": "user", "content": "def add(a, b):"}]
ACCEPTED = ("accepted", "forced", "predicted")


async def whole(stack: Stack, endpoint: str, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=stack.http, timeout=100) as http:
        reply = await http.post(f"/v1/{endpoint}", json={"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def streamed(stack: Stack, endpoint: str, **body: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=stack.http, timeout=100) as http:
        reply = await http.post(f"/v1/{endpoint}", json={"stream": True, **body})
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert reply.status_code == 200 and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_kinds(answer: dict[str, Any]) -> list[str]:
    """Return them: as many as there are tokens, and as many of each as the rounds were."""
    tokens, usage = answer["choices"][0]["speculation"]["tokens"], answer["usage"]
    kinds = [token["kind"] for token in tokens]
    assert len(kinds) == usage["completion_tokens"]
    assert sum(kind in ACCEPTED for kind in kinds) <= usage["speculation"]["num_accepted_tokens"]
    assert kinds.count("plain") == usage["speculation"]["num_plain_steps"]
    return kinds


async def test_tokens_that_a_grammar_forces_and_that_a_prediction_foretold_are_called_so(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"kind": {"const": "an_answer_of_one_kind"}}, "required": ["kind"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": {**schema, "additionalProperties": False}}}
    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "speculation": {"token_kinds": True}}
    forced = await whole(stack, "completions", response_format=wanted, **options)
    Completion.model_validate(forced)
    assert check_kinds(forced).count("forced") >= 5
    assert "round" not in forced["choices"][0]["speculation"]
    plain = await whole(stack, "chat/completions", messages=CHAT, max_tokens=40)
    assert "speculation" not in plain["choices"][0]
    text = plain["choices"][0]["message"]["content"]
    predicted = await whole(
        stack,
        "chat/completions",
        messages=CHAT,
        max_tokens=40,
        prediction={"type": "content", "content": text},
        speculation={"token_kinds": True},
    )
    ChatCompletion.model_validate(predicted)
    assert predicted["choices"][0]["message"]["content"] == text
    assert check_kinds(predicted).count("predicted") >= 20


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "speculation": {"explain": True, "num_draft_tokens": 4}},
    "rejection": {"temperature": 0.9, "seed": 3, "speculation": {"explain": True, "num_draft_tokens": 4}},
    "tree": {"temperature": 0.9, "seed": 3, "speculation": {"explain": True, "tree": "3x2x1"}},
}


@pytest.mark.parametrize("rule", RULES)
async def test_rounds_say_what_they_verified_to_who_asks_alone(stack: Stack, rule: str) -> None:
    body = {"messages": CHAT, "max_tokens": 32, "stop": ["no text has this"], **RULES[rule]}
    beside = {**body, "speculation": {**body["speculation"], "explain": False}}
    events, others = await asyncio.gather(
        streamed(stack, "chat/completions", **body), streamed(stack, "chat/completions", **beside)
    )
    assert not any("speculation" in event["choices"][0] for event in others)
    ids, num_refused, kind = list[int](), 0, "guess" if rule == "greedy" else "drawn"
    for event in events:
        ChatChunk.model_validate(event)
        told = event["choices"][0]["speculation"]
        tokens, round_ = told["tokens"], told["round"]
        assert round_["committed_len"] == events[0]["choices"][0]["speculation"]["round"]["committed_len"] + len(ids)
        ids += [token["id"] for token in tokens]
        draft, rejection, timings = round_["draft"], round_["rejection"], round_["timings"]
        assert len(draft) == round_["num_drafted"] <= 15
        kept = [token["id"] for token in draft if token["accepted"]]
        assert len(kept) == round_["num_accepted"] and [token["id"] for token in tokens][: len(kept)] == kept
        assert round_["drafter"] == ("model" if draft else None)
        assert {token["kind"] for token in draft} <= {kind} and (timings["draft_us"] is None) is (not draft)
        parts = sum(timings[name] for name in ("hold_us", "queue_us", "forward_us", "accept_us", "other_us"))
        assert timings["forward_us"] > 0 and parts >= timings["total_us"]
        if rejection is not None:
            num_refused += 1
            assert tokens[-1]["id"] == rejection["token"]["id"] and tokens[-1]["kind"] == "recovered"
            assert len(rejection["target"]) == 5 and rejection["target"][0]["logprob"] <= 0
            law = rejection["draft_law" if kind == "drawn" else "draft_guesses"]
            assert 0 < len(law) <= 5 and (rejection["draft_guesses"] is None) is (kind == "drawn")
    assert len(ids) == 32 and num_refused > 0
    if rule == "greedy":
        joined = ["".join(e["choices"][0]["delta"].get("content", "") for e in each) for each in (events, others)]
        assert joined[0] == joined[1]


async def test_the_sdk_reads_the_same(stack: Stack) -> None:
    wish = Speculation(num_draft_tokens=4, explain=True)
    async with AsyncClient(stack.grpc) as client:
        async with client.stream(PROMPT, max_tokens=24, temperature=0.9, seed=5, speculation=wish) as stream:
            rounds = [each async for each in stream]
        async with client.stream(PROMPT, max_tokens=4) as stream:
            assert [each.explanation async for each in stream if each.explanation is not None] == []
    for each in rounds:
        found = each.explanation
        assert found is not None and len(found.draft) == each.num_drafted
        assert found.drafter == ("model" if found.draft else None) and found.forward_s > 0
        assert all(token.kind is DraftTokenKind.DRAWN for token in found.draft)
        if each.tokens[-1].kind is TokenKind.RECOVERED and each.finish_reason is None:
            assert found.rejection is not None and found.rejection.token.id == each.tokens[-1].id
            assert found.rejection.token.text and found.rejection.token.logprob is None
            assert all(token.logprob is not None for token in (*found.rejection.target, *found.rejection.draft_law))
    assert any(each.explanation is not None and each.explanation.rejection is not None for each in rounds)
