from __future__ import annotations

from typing import Any

import litellm

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather

TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}


def test_tools_whole_and_streamed(base_url: str, model: str) -> None:
    options: Any = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "any",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    (call,) = litellm.completion(**options).choices[0].message.tool_calls
    assert call.function.name == "weather" and Weather.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**options, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=options["messages"])
    (streamed,) = whole.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_responses_whole_and_streamed(base_url: str, model: str) -> None:
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}
    options: Any = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "any",
        "input": QUESTION,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    (call,) = litellm.responses(**options).output
    assert call.name == "weather" and Weather.model_validate_json(call.arguments)
    events = list(litellm.responses(**options, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].arguments == call.arguments
