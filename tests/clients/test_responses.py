"""OpenAI's own client over /v1/responses: texts, formats, tools, streams, and what is sent back."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather

TOOL: Any = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
NAMED: Any = {"type": "function", "name": "weather"}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(model: str) -> Any:
    return {"model": model, "input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0}


def test_a_text_whole_and_streamed(client: openai.OpenAI, asked: Any) -> None:
    asked["max_output_tokens"] = 16
    whole = client.responses.create(**asked, instructions="Answer.", store=False)
    events = list(client.responses.create(**asked, instructions="Answer.", stream=True))
    last: Any = events[-1]
    assert whole.output_text and last.response.output_text == whole.output_text
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last.type == f"response.{whole.status}"


def test_a_parsed_format(client: openai.OpenAI, asked: Any) -> None:
    whole = client.responses.parse(**asked, text_format=Weather).output_parsed
    with client.responses.stream(**asked, text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == whole
    assert isinstance(whole, Weather)


def test_tools_streamed_and_sent_back(client: openai.OpenAI, asked: Any) -> None:
    whole = client.responses.create(**asked, tools=[TOOL])
    assert whole.output
    tools: Any = {"tools": [TOOL], "tool_choice": NAMED}
    with client.responses.stream(**asked, **tools) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    assert kinds.count("response.function_call_arguments.delta") > 1
    items: Any = [{"role": "user", "content": QUESTION}, call]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = client.responses.create(**asked | {"input": items, "max_output_tokens": 16}, tools=[TOOL])
    assert answer.output


def test_what_is_stored_nowhere_is_refused(client: openai.OpenAI, asked: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id="resp_1")
