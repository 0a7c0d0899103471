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


def test_a_chat_that_began_on_another_provider_falls_back_to_this_one(base_url: str, model: str) -> None:
    """An answer of the Messages API, and one with a call, as the library hands them on."""
    options: Any = {"model": f"openai/{model}", "api_base": base_url, "api_key": "any", "max_tokens": 16}
    thought = {"type": "thinking", "thinking": "Rome.", "signature": "c2lnbmVk"}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    past = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Rome.",
        "thinking_blocks": [thought],
        "provider_specific_fields": {"citations": None, "thinking_blocks": [thought]},
        "tool_calls": [{**call, "index": 0, "provider_specific_fields": {"signature": "x"}}],
        "annotations": [],
    }
    question = {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}
    result = {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"}
    messages: list[Any] = [question, past, result]
    for _ in range(3):
        answer = litellm.completion(**options, messages=messages, tools=[TOOL], drop_params=False)
        messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
    assert litellm.completion(**options, messages=messages).choices[0].message.content is not None


def test_calls_without_text_are_sent_back_for_three_turns(base_url: str, model: str) -> None:
    options: Any = {"model": f"openai/{model}", "api_base": base_url, "api_key": "any", "max_tokens": MAX_TOKENS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        answer = litellm.completion(
            **options, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
