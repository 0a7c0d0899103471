"""OpenAI's agents with their default model class, which speaks the Responses API."""

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather

set_tracing_disabled(True)
asked: list[str] = []


@function_tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


def agent(base_url: str, model: str, **settings: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0)
    chosen = OpenAIResponsesModel(model=model, openai_client=client)
    options = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
    return Agent(name="guide", instructions="Help.", model=chosen, model_settings=options, **settings)


def called_once(settings: ModelSettings) -> ModelSettings:
    return settings.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))


def test_a_structured_answer(base_url: str, model: str) -> None:
    result = Runner.run_sync(agent(base_url, model, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


def test_a_tool_is_called_and_what_it_said_is_streamed_on(base_url: str, model: str) -> None:
    asked.clear()
    chosen = agent(base_url, model, tools=[weather], tool_use_behavior="stop_on_first_tool")
    chosen.model_settings = called_once(chosen.model_settings)
    first = Runner.run_sync(chosen, QUESTION)
    assert first.final_output == "sunny" and len(asked) == 1

    async def streamed() -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent(base_url, model, output_type=Weather), first.to_input_list())
        kinds = [event.type async for event in result.stream_events()]
        return kinds, result.final_output

    kinds, final = asyncio.run(streamed())
    assert isinstance(final, Weather) and "raw_response_event" in kinds


def test_calls_without_text_are_sent_back_for_three_turns(base_url: str, model: str) -> None:
    chosen = agent(base_url, model, tools=[weather], tool_use_behavior="stop_on_first_tool")
    chosen.model_settings = called_once(chosen.model_settings)
    asked.clear()
    items: Any = QUESTION
    for turn in range(3):
        items = Runner.run_sync(chosen, items).to_input_list()
        assert len(asked) == turn + 1
        items.append({"role": "user", "content": "And then?"})
