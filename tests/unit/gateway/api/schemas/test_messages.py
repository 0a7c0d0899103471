"""What describes a message, a call or a tool is taken on every endpoint; what asks for something that is not done is
refused by name. Each case is the body of a request, and the prompt that it makes.
"""

from typing import Any

import pytest

from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.api.schemas.prompts_of import SCHEMA, USER, called, chat_of, prompt_of, result, said


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reasoning": "x"}, "<x>b"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "x"}]}, "b"),
        ({"reasoning": "x", "reasoning_content": "y"}, "<y>b"),
        ({"provider_specific_fields": {"a": 1}, "id": "m", "cache_control": {"type": "ephemeral"}}, "b"),
        ({"annotations": [{"a": 1}], "audio": {"id": "x"}, "function_call": None, "tool_calls": []}, "b"),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}]}, "<t>b"),
        ({"content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "b"}]}, "<t>b"),
        ({"content": None, "reasoning_content": "r"}, "<r>"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": []}, ""),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "[image left out]"),
        ({"content": "", "function_call": {"name": "read", "arguments": "{}"}}, "(read {})"),
    ],
)
async def test_fields_of_an_assistants_message(fields: dict[str, Any], text: str) -> None:
    assert await chat_of(USER, said(**fields), USER) == f"[user]a[assistant]{text}[user]a"


async def test_fields_of_other_messages_of_calls_and_of_tools() -> None:
    call = {"index": 0, "id": "c", "type": None, "function": {"name": "read", "arguments": "{}", "parsed": 1}}
    call["extra_content"] = {"google": {}}
    tool = {"type": "function", "cache_control": {}, "function": {"name": "read", "parameters": SCHEMA, "more": 1}}
    answer = {"role": "assistant", "tool_calls": [call, {"type": "custom", "custom": {"name": "patch", "input": "p"}}]}
    text = await chat_of(
        {"role": "system", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "id": 5},
        answer,
        result([{"type": "text", "text": "see"}, {"type": "input_audio"}], status="success"),
        {"role": "function", "name": "read", "content": None},
        tools=[tool, {"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}],
        client_metadata={"a": "b"},
    )
    assert text == 'read [system][user]a[assistant](read {})(patch {"input": "p"})[tool]see\n[audio left out][tool]'


ARGUMENTS: list[tuple[Any, str]] = [
    ('{"x": "tr', r'{"arguments": "{\"x\": \"tr"}'),
    ("[1]", '{"arguments": "[1]"}'),
    ('"Beijing"', r'{"arguments": "\"Beijing\""}'),
    ("Beijing", '{"arguments": "Beijing"}'),
    ("null", "{}"),
    ("", "{}"),
    (None, "{}"),
    ('{"x":1}{"x":1}', r'{"arguments": "{\"x\":1}{\"x\":1}"}'),
    ('{"x": NaN}', r'{"arguments": "{\"x\": NaN}"}'),
    ('{"x": "a\nb"}', r'{"arguments": "{\"x\": \"a\nb\"}"}'),
    ({"x": 1}, '{"x": 1}'),
    ([1], '{"arguments": "[1]"}'),
]


@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS)
async def test_a_broken_call_in_the_past(arguments: Any, text: str) -> None:
    told = f"[user]a[assistant](read {text})[tool]failed[user]go on"
    go_on = {"role": "user", "content": "go on"}
    assert await chat_of(USER, called(arguments), result(), go_on) == told
    items = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "failed"},
        go_on,
    ]
    assert await prompt_of("responses", {"input": items}) == told
    use = {"type": "tool_use", "id": "c", "name": "read", "input": arguments}
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "failed", "is_error": True}
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [failed]}, go_on]
    assert await prompt_of("messages", {"messages": messages}) == told


async def test_the_number_and_size_of_tools_are_settings() -> None:
    def tools(count: int, text: str = "") -> list[Any]:
        return [{"type": "function", "function": {"name": f"f{at}", "description": text}} for at in range(count)]

    await chat_of(USER, tools=tools(512))
    await chat_of(USER, tools=tools(1, "d" * 200_000))
    await chat_of(USER, called("{}", tool_calls=[called("{}")["tool_calls"][0]] * 150))
    for asked, settings, words in (
        (tools(513), {}, r"tools has 513 tools, at most 512 are allowed \(--max-tools\)"),
        (tools(3), {"max_tools": 2}, "at most 2 are allowed"),
        (tools(1, "d" * 2000), {"max_tools_bytes": 2000}, r"at most 2000 are allowed \(--max-tools-bytes\)"),
        (tools(5000), {}, "tools has 5000 items, at most 4096 are allowed$"),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            await prompt_of("chat", {"messages": [USER], "tools": asked}, **settings)
        assert len(caught.value.message) < 120, "it does not print the list"


async def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    assert await chat_of(USER, template="{{ reasoning_effort }}", reasoning_effort="low") == "low"
