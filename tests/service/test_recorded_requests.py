"""What real clients ask for, as `make clients` recorded it, is answered in forms that the official types read."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.api.schemas.answers import messages as our_messages
from gateway.api.schemas.answers import openai as ours
from gateway.api.schemas.answers import responses as our_responses
from gateway.api.schemas.answers import server as our_server
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer

FOLDER = Path(__file__).parents[1] / "data/requests"
RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
TOKENIZER = demo_tokenizer()
READERS: dict[str, tuple[list[Any], list[Any]]] = {
    "/v1/chat/completions": ([ChatCompletion, ours.ChatCompletion], [ChatCompletionChunk, ours.ChatChunk]),
    "/v1/completions": ([ours.Completion], [ours.Completion]),  # the official type has no null among log-probs
    "/tokenize": ([our_server.Tokenized], []),
    "/detokenize": ([our_server.Detokenized], []),
    "/v1/responses": ([Response, our_responses.Response], [ResponseStreamEvent, our_responses.ResponseEvent]),
    "/v1/messages": ([our_messages.MessageAnswer], [our_messages.MessageEvent]),
    "/v1/messages/count_tokens": ([our_messages.TokenCount], []),
}
"""By path: what reads whole answers, and what reads the events of a stream."""


_adapter = cache(TypeAdapter)


def read(readers: list[Any], value: Any) -> None:
    assert readers
    for reader in readers:
        _adapter(reader).validate_python(value)


@pytest.mark.parametrize("name", RECORDED)
async def test_recorded_requests_are_answered(name: str) -> None:
    requests = RECORDED[name]
    assert len(requests) > 5
    async with in_process(ScriptedGenerator(TOKENIZER, "the quick brown fox", ("target",))) as http:
        for asked in requests:
            answer = await http.request(asked["method"], asked["path"], json=asked["body"])
            assert answer.status_code == asked["status"], (asked, answer.text)
            if answer.status_code != 200:
                continue
            whole, event = READERS[asked["path"].partition("?")[0]]
            if not asked["body"].get("stream"):
                read(whole, answer.json())
                continue
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
            assert len(lines) > 2
            for line in lines:
                read(event, json.loads(line))
