"""What an answer of the real system says on request: its tokens' kinds, and what its rounds verified and refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.api.schemas.answers.openai import ChatChunk
from tests.stack import Stack

CHAT = [{"role": "user", "content": "def add(a, b):"}]


async def streamed(stack: Stack, endpoint: str, **body: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=stack.http, timeout=100) as http:
        reply = await http.post(f"/v1/{endpoint}", json={"stream": True, **body})
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert reply.status_code == 200 and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


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
