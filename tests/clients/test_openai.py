"""The official client: parsed formats, and tools required, named, auto, streamed, one or several."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather

TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")
OTHER: Any = openai.pydantic_function_tool(Weather, name="tickets")
NAMED: Any = {"type": "function", "function": {"name": "tickets"}}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(model: str) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "tools": [TOOL, OTHER]}


def test_a_parsed_format(client: openai.OpenAI, asked: Any) -> None:
    del asked["tools"]
    message = client.beta.chat.completions.parse(**asked, response_format=Weather).choices[0].message
    assert isinstance(message.parsed, Weather)


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "tickets"}), (NAMED, {"tickets"})])
def test_calls_that_must_be_made(client: openai.OpenAI, asked: Any, choice: Any, names: set[str]) -> None:
    answer = client.beta.chat.completions.parse(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.function.name in names and isinstance(call.function.parsed_arguments, Weather)


def test_a_streamed_call(client: openai.OpenAI, asked: Any) -> None:
    with client.beta.chat.completions.stream(**asked, tool_choice=NAMED) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert kinds.count("tool_calls.function.arguments.delta") > 1


def test_a_streamed_call_can_be_sent_back(client: openai.OpenAI, asked: Any) -> None:
    with client.beta.chat.completions.stream(**asked, tool_choice=NAMED) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    asked["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(**asked | {"max_tokens": 16}, tool_choice="none").choices[0]
    assert answer.message.content is not None and answer.message.tool_calls is None


def test_parallel_calls(client: openai.OpenAI, asked: Any) -> None:
    stream = client.chat.completions.create(
        **asked | {"temperature": 1, "seed": 3}, tool_choice="required", stream=True
    )
    deltas = [call for chunk in stream for each in chunk.choices for call in each.delta.tool_calls or []]
    arguments: dict[int, str] = {}
    for delta in deltas:
        assert delta.function is not None
        arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
    assert list(arguments) == list(range(len(arguments)))
    Weather.model_validate_json(arguments[0])


def test_a_chat_about_what_a_tool_said(client: openai.OpenAI, asked: Any) -> None:
    message = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls or []
    asked["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(**asked | {"max_tokens": 16}, tool_choice="auto").choices[0]
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert answer.message.content or answer.message.tool_calls


def test_calls_without_text_are_sent_back_for_three_turns(client: openai.OpenAI, asked: Any) -> None:
    for _ in range(3):
        answer = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
        message = answer.choices[0].message
        assert message.content is None and message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        asked["messages"] += [message, result]
    assert client.chat.completions.create(**asked | {"max_tokens": 16}).choices[0].finish_reason
