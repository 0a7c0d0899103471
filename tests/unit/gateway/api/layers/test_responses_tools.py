"""Tools of the Responses API that this server has not."""

import pytest

from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.layers.responses_writer import custom_input
from gateway.api.schemas.parsing import parse_body
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.api.schemas.prompts_of import SCHEMA, USER, prompt_of


async def test_tools_that_the_server_has_not_are_left_out() -> None:
    function = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    tools = [
        function,
        {"type": "custom", "name": "patch", "format": grammar},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__x", "tools": [function, {"type": "custom", "name": "any"}]},
        *({"type": kind} for kind in ("local_shell", "mcp", "tool_search", "image_generation")),
    ]
    body = {"input": "a", "tools": tools, "client_metadata": {"x": "y"}, "reasoning": {"context": "auto"}}
    assert await prompt_of("responses", body) == "read patch mcp__x__read mcp__x__any [user]a"
    offered = parse_body(ResponsesBody, body).offered
    assert [(each.call_type, each.item_fields()) for each in offered.values()] == [
        ("function_call", {"name": "read"}),
        ("custom_tool_call", {"name": "patch"}),
        ("function_call", {"name": "read", "namespace": "mcp__x"}),
        ("custom_tool_call", {"name": "any", "namespace": "mcp__x"}),
    ]
    assert "start: x" in (offered["patch"].tool.description or "")
    own = {"name": "f", "input_schema": SCHEMA, "defer_loading": True, "allowed_callers": ["direct"]}
    others = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "g", "input_schema": SCHEMA, "allowed_callers": ["code_execution_20250825"]},
    ]
    assert await prompt_of("messages", {"messages": [USER], "tools": [own, *others]}) == "f [user]a"
    for choice in ("required", {"type": "function", "name": "web_search"}):
        with pytest.raises(InvalidRequest, match="tool_choice"):
            await prompt_of("responses", {"input": "a", "tools": [tools[2]], "tool_choice": choice})
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.name is 'read', as that of tools\[0\]"):
        await prompt_of("responses", {"input": "a", "tools": [function, function]})


async def test_items_of_such_tools_in_the_past() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "namespace": "x", "input": "p"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "local_shell_call_output", "id": "w", "output": "x"},
        {"type": "mcp_list_tools", "tools": []},
    ]
    told = '[user]a[assistant](x__patch {"input": "p"})[tool][image left out][user]a'
    assert await prompt_of("responses", {"input": [USER, *items, {**USER, "type": None}]}) == told
    assert await prompt_of("responses", {"input": [], "instructions": "i"}) == "[system]i"
    assert await prompt_of("responses", {"input": []}) == await prompt_of("responses", {"input": ""}) == "[user]"
    assert [custom_input(text) for text in ('{"input": "a\\nb"}', '{"input": "a', "[1]")] == [
        "a\nb",
        '{"input": "a',
        "[1]",
    ]
