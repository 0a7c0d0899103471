"""/v1/messages as Anthropic's clients read it; a scripted generator says what the model would."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.request_checks import MAX_MESSAGES
from gateway.api.layers.layer_answer import AnswerReader
from gateway.generation import FinishReason, OutputTimings, RoundOutput
from gateway.tools.parts import Content
from outrider.wire.errors import Overloaded, Unavailable, WorkerLost
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator
from tests.service.test_http_tools import CALLS, FOUND, TOOL, generator_of

PATH = "/v1/messages"
FUNCTION: Any = {"name": "Weather", "input_schema": TOOL["function"]["parameters"], "cache_control": {"type": "x"}}
REASONED = "The user asks.\n</think>\n\n" + CALLS
ASKED: Any = {"max_tokens": 300, "messages": [{"role": "user", "content": "Weather?"}]}
MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")


async def posted(generator: ScriptedGenerator, **changes: Any) -> Any:
    async with in_process(generator) as http:
        answer = await http.post(PATH, json=ASKED | changes, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(generator: ScriptedGenerator, **changes: Any) -> list[Any]:
    """Return the events, each named as its data says."""
    async with in_process(generator) as http:
        answer = await http.post(PATH, json=ASKED | {"stream": True} | changes)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.own_tokenizer.decode(generator.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_a_text_is_one_block_and_cached_tokens_are_counted_apart() -> None:
    generator = generator_of("the quick brown fox")
    generator.num_cached = 3
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = await posted(generator, system=system, metadata={"user_id": "me"}, top_k=5)
    assert tuple(answer) == MESSAGE and answer["id"].startswith("msg")
    assert answer["content"] == [{"type": "text", "text": generator.text}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    (request,) = generator.requests
    usage = answer["usage"]
    assert usage["input_tokens"] + 3 == len(request.prompt_ids) and usage["cache_read_input_tokens"] == 3
    assert usage["output_tokens"] == len(generator.own_tokenizer.encode(generator.text))
    assert "Be brief." in prompt_of(generator) and request.params.top_k == 5


async def test_thinking_text_and_tool_use_are_blocks_in_their_order() -> None:
    answer = await posted(generator_of(REASONED, "reasoning"), tools=[FUNCTION])
    thinking, text, *calls = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "The user asks.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."} and answer["stop_reason"] == "tool_use"
    assert [(each["type"], each["name"], each["input"]) for each in calls] == [
        ("tool_use", "Weather", x) for x in FOUND
    ]


async def test_the_events_come_in_anthropics_order_and_add_up() -> None:
    events = await streamed(generator_of(REASONED, "reasoning"), tools=[FUNCTION])
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    assert once == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    message = events[0]["message"]
    assert tuple(message) == MESSAGE and message["content"] == [] and message["usage"]["input_tokens"] > 0
    deltas: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            deltas.setdefault(event["index"], []).append(event["delta"])
    told = ["".join("".join(each[k] for k in each if k != "type") for each in deltas[at]) for at in range(4)]
    assert told[:2] == ["The user asks.", "Let me see."]
    assert [json.loads(each) for each in told[2:]] == FOUND
    assert {each["type"] for each in deltas[2]} == {"input_json_delta"} and len(deltas[2]) > 1
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[2]["input"] == {} and starts[2]["id"] != starts[3]["id"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, None),
        ({"max_tokens": 10**6}, "end_turn", None, None),
        ({"stop_sequences": ["brown"]}, "stop_sequence", "brown", "the quick "),
    ],
)
async def test_why_an_answer_ended(changes: Any, reason: str, sequence: str | None, text: str | None) -> None:
    answer = await posted(generator_of("the quick brown fox jumps"), **changes)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert text in (None, answer["content"][0]["text"])


async def test_what_a_client_sends_back_is_one_chat() -> None:
    generator = generator_of(REASONED, "reasoning")
    answer = await posted(generator, tools=[FUNCTION])
    calls = [each for each in answer["content"] if each["type"] == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "sunny 0", "is_error": False},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": [{"type": "text", "text": "sunny 1"}]},
        {"type": "text", "text": "Thanks.", "citations": None},
    ]
    messages = [*ASKED["messages"], {key: answer[key] for key in ("role", "content")}]
    await posted(generator, messages=[*messages, {"role": "user", "content": results}], tools=[FUNCTION])
    prompt = prompt_of(generator)
    texts = ("Weather?", "Let me see.", '"Rome"', '"Paris"', "sunny 0", "sunny 1", "Thanks.")
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places) and prompt.count("assistant") == 2


async def test_tokens_are_counted_as_a_message_would() -> None:
    generator = generator_of("x")
    asked = {"messages": ASKED["messages"], "tools": [FUNCTION], "system": "Be brief."}
    async with in_process(generator) as http:
        counted = await http.post(f"{PATH}/count_tokens", json=asked)
        wrong = asked | {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}}
        uncounted = await http.post(f"{PATH}/count_tokens", json=wrong)
        unanswered = await http.post(PATH, json=wrong | {"max_tokens": 1})
    assert not generator.requests
    assert uncounted.status_code == 400 and uncounted.json() == unanswered.json()
    assert "output_config.format.schema" in uncounted.json()["error"]["message"]
    await posted(generator, **asked)
    assert counted.json() == {"input_tokens": len(generator.requests[0].prompt_ids)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "It"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "role",
        ),
        ({"tools": [{"name": "bash"}]}, "tools[0]"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "tool_choice names the tool 'bash'",
        ),
        ({"compaction": {"type": "auto"}}, "compaction"),
        ({"tools": [FUNCTION | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(changes: Any, text: str) -> None:
    async with in_process(generator_of("x")) as http:
        answer = await http.post(PATH, json=ASKED | changes)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert text in told["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [(Overloaded("full"), 429, "rate_limit_error"), (Unavailable("gone"), 503, "api_error")],
)
async def test_errors_have_anthropics_form(refusal: Any, status: int, kind: str) -> None:
    generator = generator_of("x")
    generator.refusal = refusal
    async with in_process(generator) as http:
        for stream in (False, True):
            answer = await http.post(PATH, json=ASKED | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        missing = await http.post(PATH, json=ASKED | {"model": "claude"})
        nothing = await http.post(f"{PATH}/batches", json={})
        wrong = await http.get(PATH)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert nothing.status_code == 404 and "messages/batches are not offered" in nothing.json()["error"]["message"]
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


async def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    generator = generator_of("the quick brown fox")
    generator.fail_at = (1, WorkerLost("the target is gone"))
    events = await streamed(generator)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the target is gone"}}


async def test_a_key_may_come_in_either_header(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", (ApiKey(name="me", sha256=digest_of("secret")),))
    async with in_process(generator_of("x"), api_keys=str(tmp_path / "keys.yaml")) as http:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            answer = await http.post(PATH, json=ASKED, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 401


async def test_a_call_that_is_none_within_a_round_is_never_told() -> None:
    reader = generator_of("x")
    await posted(reader, tools=[FUNCTION])
    answer = AnswerReader(reader.requests[0].reading)
    text = 'So <tool_call>\n{"name": "Weather", "arguments": {"city": Rome}}\n</tool_call> sorry'
    parts = answer.parts(RoundOutput((), text, 0, 0, OutputTimings(), FinishReason.STOP))
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text
    assert {type(part) for part in parts} == {Content}


async def test_what_a_body_holds_is_bounded() -> None:
    block = {"type": "text", "text": "x"}
    many = [{"role": "user", "content": [block] * (MAX_MESSAGES + 1)}]
    pair = [{"type": "tool_result", "tool_use_id": "a", "content": "x"}, block]
    async with in_process(generator_of("x")) as http:
        long = await http.post(PATH, json=ASKED | {"messages": many})
        grown = await http.post(PATH, json=ASKED | {"messages": [{"role": "user", "content": pair * 2000}] * 2})
    assert long.status_code == 400 and "messages[0].content" in long.json()["error"]["message"]
    assert grown.json()["error"]["message"].startswith("messages has 8000 messages")
