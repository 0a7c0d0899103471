"""vLLM's endpoints around the tokenizer, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import outrider
from tests.service.scripted_generator import CONTEXT_LIMIT, ScriptedGenerator, demo_tokenizer
from tests.service.test_http_front import in_process

TOKENIZER = demo_tokenizer()
CHAT: Any = [{"role": "user", "content": "hello there"}]


async def test_a_text_and_back() -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        told = (await http.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True})).json()
        back = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()
        empty = (await http.post("/tokenize", json={"prompt": ""})).json()
    ids = TOKENIZER.encode("hello there")
    assert told == {"count": 2, "max_model_len": CONTEXT_LIMIT, "tokens": ids, "token_strs": ["hello", "Ġthere"]}
    assert back == {"prompt": "hello there"} and empty["count"] == 0 and empty["token_strs"] is None


async def test_a_chat_is_tokenised_as_it_is_answered_and_special_tokens_come_back() -> None:
    generator = ScriptedGenerator(TOKENIZER)
    async with in_process(generator) as http:
        told = (await http.post("/tokenize", json={"messages": CHAT})).json()
        await http.post("/v1/chat/completions", json={"messages": CHAT})
        special = sorted(TOKENIZER.special_ids)[0]
        back = (await http.post("/detokenize", json={"tokens": [special]})).json()
    assert tuple(told["tokens"]) == generator.requests[0].prompt_ids
    assert back == {"prompt": TOKENIZER.token_text(special)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, body: Any, param: str) -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        answer = await http.post(path, json=body)
        unknown = await http.post(path, json={"prompt": "x", "tokens": [1]} | {"model": "other"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert unknown.status_code in (400, 404)


async def test_the_version_and_what_is_not_offered() -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        assert (await http.get("/version")).json() == {"version": outrider.__version__}
        for path in ("embeddings", "images/generations", "batches", "audio/speech", "files"):
            answer = await http.post(f"/v1/{path}", json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"].startswith(f"{path.split('/')[0]} are not offered")
