"""Anthropic's own client: texts, tools, streams, formats, counts and errors."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather


class City(BaseModel):
    """Without bounds, which this client does not send."""

    city: Literal["Paris", "Rome"]


TOOL: Any = {"name": "weather", "input_schema": Weather.model_json_schema(), "cache_control": {"type": "ephemeral"}}
NAMED: Any = {"type": "tool", "name": "weather"}


@pytest.fixture
def client(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(model: str) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}


def test_a_text_whole_and_streamed(client: anthropic.Anthropic, asked: Any) -> None:
    asked["max_tokens"] = 16
    system: Any = [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**asked, system=system)
    with client.messages.stream(**asked, system="Answer.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text" and block.text == text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


def test_tools_streamed_and_sent_back(client: anthropic.Anthropic, asked: Any) -> None:
    whole = client.messages.create(**asked, tools=[TOOL], tool_choice=NAMED)
    with client.messages.stream(**asked, tools=[TOOL], tool_choice=NAMED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    (call,), (other,) = final.content, whole.content
    assert call.type == "tool_use" == other.type and call.input == other.input
    assert Weather.model_validate(call.input) and final.stop_reason == "tool_use"
    assert kinds.count("input_json") > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    asked["messages"] += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked | {"max_tokens": 16}, tools=[TOOL]).content


def test_a_parsed_format(client: anthropic.Anthropic, asked: Any) -> None:
    answer = client.messages.parse(**asked, output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_counted_tokens(client: anthropic.Anthropic, asked: Any) -> None:
    counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"], tools=[TOOL])
    asked["max_tokens"] = 1
    usage = client.messages.create(**asked, tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors(client: anthropic.Anthropic, asked: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**asked | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
        client.messages.create(**asked | {"messages": [{"role": "user", "content": [image]}]})


def test_the_tool_runner_goes_on_without_threads_for_three_turns(client: anthropic.Anthropic, asked: Any) -> None:
    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    for stream in (False, True):
        cities.clear()
        runner: Any = client.beta.messages.tool_runner(
            **asked, tools=[weather], tool_choice=NAMED, max_iterations=3, stream=stream
        )
        for answer in runner:
            message = answer.get_final_message() if stream else answer
            assert [block.type for block in message.content] == ["tool_use"]
        assert len(cities) in (2, 3), "the last answer's call is not run by all versions"
