from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather


@pytest.fixture
def chat(base_url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=base_url, model=model, api_key="any", max_tokens=MAX_TOKENS, temperature=0, max_retries=0
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_bound_tools(chat: ChatOpenAI, choice: str) -> None:
    bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])
    streamed = None
    for chunk in bound.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and [each["args"] for each in streamed.tool_calls] == [call["args"]]


def test_calls_without_text_are_sent_back_for_three_turns(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(3):
        message = bound.invoke(messages)
        assert not message.content
        (call,) = message.tool_calls
        messages += [message, ToolMessage("sunny", tool_call_id=call["id"])]
