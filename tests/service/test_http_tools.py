"""Tools and reasoning over HTTP, as the official client reads them; a scripted generator says what the model would."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.tokenizer import Tokenizer
from tests.rendering import inline_template
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer
from tests.service.test_routes import CHAT, MODEL

TEMPLATES = Path(__file__).parents[1] / "data/templates"
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}]}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris", "days": 1}}\n</tool_call>'
)


class Weather(BaseModel):
    """The weather."""

    city: str
    days: int


TOOL: Any = openai.pydantic_function_tool(Weather)
FOUND = [{"city": "Rome", "days": 3}, {"city": "Paris", "days": 1}]


@cache
def tokenizer_of(template: str) -> Tokenizer:
    tokenizer: Tokenizer = demo_tokenizer()
    if template != "demo":
        tokenizer.template = inline_template((TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
    return tokenizer


def generator_of(text: str, template: str = "demo") -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer_of(template), text)


@asynccontextmanager
async def client_of(generator: ScriptedGenerator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with in_process(generator) as http:
        yield openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", max_retries=0, http_client=http)


async def test_a_stream_of_calls_adds_up_to_the_whole() -> None:
    async with client_of(generator_of(CALLS)) as client:
        async with client.chat.completions.stream(**ASKED, tools=[TOOL]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASKED, tools=[TOOL], stream=True)]
    (choice,) = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or []] == [Weather(**x) for x in FOUND]
    assert [event.type for event in events].count("tool_calls.function.arguments.done") == 2
    deltas = [call for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or []]
    assert len(deltas) > 6, "arguments come in pieces"
    for index in (0, 1):
        own = [each for each in deltas if each.index == index]
        assert own[0].id and own[0].type == "function" and own[0].function and own[0].function.name == "Weather"
        assert all(each.id is None and each.function and each.function.name is None for each in own[1:])
        assert json.loads("".join(each.function.arguments or "" for each in own if each.function)) == FOUND[index]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.finish_reason for chunk in chunks for each in chunk.choices][-1] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "is_bound", "is_told"),
    [
        ("required", True, True),
        ({"type": "function", "function": {"name": "Weather"}}, True, True),
        ("auto", True, True),
        ("none", False, False),
    ],
    ids=["required", "named", "auto, strict", "none"],
)
async def test_what_must_be_called_is_bound_by_a_grammar(choice: Any, is_bound: bool, is_told: bool) -> None:
    generator = generator_of("x")
    async with client_of(generator) as client:
        await client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice=choice)
    (request,) = generator.requests
    assert bool(request.params.grammar) is is_bound
    assert ("<tools>" in generator.own_tokenizer.decode(request.prompt_ids)) is is_told


async def test_reasoning_is_split_off_and_counted() -> None:
    generator = generator_of("The user asks.\n</think>\n\n" + CALLS, "reasoning")
    async with client_of(generator) as client:
        answer = await client.chat.completions.create(**ASKED, tools=[TOOL], reasoning_effort="low")
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASKED, **usage)]
    assert "Effort: low" in generator.own_tokenizer.decode(generator.requests[0].prompt_ids)
    (choice,) = answer.choices
    assert (choice.message.reasoning_content, choice.message.content) == ("The user asks.", "Let me see.")
    assert len(choice.message.tool_calls or []) == 2
    count = len(generator.own_tokenizer.encode("The user asks.\n</think>"))
    for told in (answer.usage, chunks[-1].usage):
        assert told is not None and told.completion_tokens_details is not None
        assert abs((told.completion_tokens_details.reasoning_tokens or 0) - count) <= 1
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "The user asks."
    assert "".join(delta.content or "" for delta in deltas) == CALLS, "without tools there are no calls"


async def test_a_call_put_together_from_a_stream_can_be_sent_back() -> None:
    function = {"name": "Weather", "arguments": "", "parsed_arguments": {}}  # the last as the official client has it
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    replayed = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    generator = generator_of("x")
    async with in_process(generator) as http:
        answer = await http.post(CHAT, json={**ASKED, "messages": [*ASKED["messages"], *replayed]})
    assert answer.status_code == 200, answer.text
    assert '{"name": "Weather", "arguments": {}}' in generator.own_tokenizer.decode(generator.requests[0].prompt_ids)
