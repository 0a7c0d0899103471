from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.weather import QUESTION, Weather


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
def test_an_agent_with_an_output_type(base_url: str, model: str, output: Any) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="any")
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=output(Weather))
    settings: Any = {"temperature": 0}
    assert isinstance(agent.run_sync(QUESTION, model_settings=settings).output, Weather)


def test_calls_without_text_are_sent_back_for_three_turns(base_url: str, model: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="any")
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=ToolOutput(Weather))
    settings: Any = {"temperature": 0, "parallel_tool_calls": False}
    history: list[Any] = []
    for _ in range(3):
        result = agent.run_sync(QUESTION, model_settings=settings, message_history=history)
        assert isinstance(result.output, Weather)
        history = result.all_messages()
