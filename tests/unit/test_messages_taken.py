"""What describes a message, a call or a tool is taken on every endpoint; what asks for something that is not done is
refused by name. Each case is the body of a request, and the prompt that it makes.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.text_threads import TextThreads
from gateway.api.forms.messages_schemas import CountBody, MessagesBody
from gateway.api.forms.responses_form import custom_input
from gateway.api.forms.responses_schemas import ResponsesBody
from gateway.api.schemas import base as base_schemas
from gateway.api.schemas.openai import ChatBody, parse_body
from gateway.api.schemas.vllm import TokenizeBody
from gateway.generation import ServedFacts
from outrider.wire.errors import InvalidRequest, NoThreads
from tests.rendering import inline_template
from tests.service.scripted_generator import config, demo_tokenizer

TOKENIZER = demo_tokenizer()
PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
STRICT = (
    '{% for m in messages %}{% if m.role == "system" and not loop.first %}'
    '{{ raise_exception("System message must be at the beginning.") }}{% endif %}'
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% set n = namespace(last='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first or not m.content %}{{ raise_exception('system') }}{% endif %}{% else %}"
    "{% if m.role == n.last or (m.role == 'user' and n.last == 'tool') or (n.last == '' and m.role != 'user') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set n.last = m.role %}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
BODIES: dict[str, type[BaseModel]] = {"chat": ChatBody, "responses": ResponsesBody, "messages": MessagesBody}
USER = {"role": "user", "content": "a"}
HEADER = "x-anthropic-billing-header: cc_version=2.1.0; cch=11111;"
SCHEMA = {"type": "object", "properties": {}}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "b", **fields}


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def result(content: Any = "failed", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **fields}


async def prompt_of(endpoint: str, body: dict[str, Any], template: str = PLAIN, **settings: Any) -> str:
    """Return the prompt of a request. Raise InvalidRequest."""
    needed = {"max_tokens": 1} if endpoint == "messages" else {}
    (chat,) = parse_body(BODIES[endpoint], needed | body).demand("id").prompts  # type: ignore[attr-defined]
    TOKENIZER.template = inline_template(template, TOKENIZER.special_tokens)
    chats = ChatSettings.of_config(config(**settings))
    reader = PromptReader(TOKENIZER, 1 << 20, b"", TextThreads(), 4 << 20, chats)
    return await reader.render("messages", chat)


async def chat_of(*messages: dict[str, Any], template: str = PLAIN, **body: Any) -> str:
    return await prompt_of("chat", {"messages": list(messages), **body}, template)


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


def test_what_is_ignored_is_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_schemas, "_named", set())
    caplog.set_level(logging.INFO)
    for number in range(2 * base_schemas.MAX_NAMED):
        parse_body(ChatBody, {"messages": [said(odd=1), said(**{f"n{number // 2}" * 100: 1})]})
    assert caplog.text.count("'odd' of a message") == 1
    assert len(caplog.records) == base_schemas.MAX_NAMED and all(len(each.message) < 200 for each in caplog.records)


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


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("roles", [("system", "system"), ("system", "developer"), ("developer", "developer")])
async def test_several_system_messages_are_merged_where_a_template_refuses_them(roles: tuple[str, str]) -> None:
    messages = [system("one", roles[0]), system("two", roles[1]), USER]
    assert await chat_of(*messages, template=STRICT) == "[system]one\n\ntwo[user]a"
    assert await chat_of(*messages) == "[system]one[system]two[user]a", "what a template takes is not changed"
    with pytest.raises(InvalidRequest, match="must be at the beginning"):
        await prompt_of("chat", {"messages": messages}, STRICT, system_messages="as-given")


async def test_later_system_messages_are_merged_and_layers_make_one_of_the_first() -> None:
    late = [USER, said(), system("late"), USER]
    assert await chat_of(*late, template=STRICT) == "[system]late[user]a[assistant]b[user]a"
    items = [system("d1", "developer"), system("d2", "developer"), USER]
    assert await prompt_of("responses", {"input": items, "instructions": "i"}) == "[system]i\n\nd1\n\nd2[user]a"
    body = {"system": "s", "messages": [USER, said(), system("mid"), USER]}
    assert await prompt_of("messages", body, STRICT) == "[system]s\n\nmid[user]a[assistant]b[user]a"
    assert await prompt_of("messages", body) == "[system]s[user]a[assistant]b[system]mid[user]a"


async def test_roles_are_made_to_alternate_where_a_template_refuses_them() -> None:
    chat = [system(""), USER, USER]
    assert await chat_of(*chat, template=ALTERNATING) == "[user]a\n\na"
    assert await chat_of(said(), USER, template=ALTERNATING) == "[user][assistant]b[user]a"
    chat = [USER, called("{}"), result(), USER]
    assert await chat_of(*chat, template=ALTERNATING) == "[user]a[assistant][tool]failed[assistant][user]a"
    chat = [system("s"), USER, said(), said(content="c"), USER]
    assert await chat_of(*chat, template=NO_SYSTEM) == "[user]s\n\na[assistant]b\n\nc[user]a"


async def test_an_agents_header_stays_out_of_system_blocks() -> None:
    blocks = [{"type": "text", "text": HEADER}, {"type": "text", "text": "LONG", "cache_control": {}}]
    body = {"system": blocks, "messages": [{"role": "user", "content": HEADER}]}
    assert await prompt_of("messages", body) == f"[system]LONG[user]{HEADER}"
    assert await prompt_of("messages", body, agent_header="keep") == f"[system]{HEADER}\nLONG[user]{HEADER}"
    assert await prompt_of("messages", {**body, "system": HEADER}) == f"[user]{HEADER}"
    kept = {**body, "system": [{"type": "text", "text": f"See {HEADER}\n{HEADER}"}, blocks[0]]}
    assert await prompt_of("messages", kept) == f"[system]See {HEADER}\n{HEADER}[user]{HEADER}"
    assert await chat_of(system(f"{HEADER}\nLONG"), USER) == "[system]LONG[user]a"
    assert await prompt_of("responses", {"input": "a", "instructions": f"{HEADER}\nLONG"}) == "[system]LONG[user]a"


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


@pytest.mark.parametrize("name", ["mcp__server__" + "a" * 115, "files.read:now"])
async def test_names_of_tools_have_128_characters_on_every_endpoint(name: str) -> None:
    named = {"name": name, "parameters": SCHEMA}
    told = f"{name} [user]a"
    assert await chat_of(USER, tools=[{"type": "function", "function": named}]) == told
    assert await prompt_of("responses", {"input": "a", "tools": [{"type": "function", **named}]}) == told
    tools = [{"name": name, "input_schema": SCHEMA}]
    assert await prompt_of("messages", {"messages": [USER], "tools": tools}) == told


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


async def test_what_tools_return_beside_text() -> None:
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "in"}]}},
        {"type": "search_result", "title": "t", "source": "u", "content": [{"type": "text", "text": "hit"}]},
        {"type": "tool_reference", "tool_name": "f"},
    ]
    found = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found, blocks[2]]}]
    told = "see\n[image left out]\nT\ndoc\n[document left out]\nin\nt\nu\nhit\nf"
    text = await prompt_of("messages", {"messages": messages})
    assert text == f"[user]a[assistant](read {{}})[tool]{told}[user]T\ndoc"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert (await chat_of(USER, called("{}"), result([image, {"text": "t"}]))).endswith("[tool][image left out]\nt")


@pytest.mark.parametrize(
    ("endpoint", "field", "part"),
    [
        ("chat", "messages", {"type": "image_url", "image_url": {"url": "x"}}),
        ("responses", "input", {"type": "input_image", "image_url": "x"}),
        ("messages", "messages", {"type": "image", "source": {"type": "url", "url": "x"}}),
    ],
)
def test_an_image_for_a_model_that_is_served_text_only_is_refused_by_that(
    endpoint: str, field: str, part: dict[str, Any]
) -> None:
    body = {"model": "seer", "max_tokens": 1, field: [{"role": "user", "content": [part]}]}
    served = (ServedFacts("m", 512, 320, 0, 1, None), ServedFacts("seer", 512, 320, 0, 1, None, text_only=True))
    for name, told in (("seer", True), ("m", False)):
        with pytest.raises(InvalidRequest, match=r"has a (part|block) of type") as refused:
            parse_body(BODIES[endpoint], body | {"model": name}, lambda: served)
        assert ("; seer is served text only: what reads images" in refused.value.message) is told


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        ("chat", {"messages": [USER, said(prefix=True)]}, "prefix"),
        ("chat", {"messages": [USER, said(partial=True)]}, "partial"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("chat", {"messages": [USER], "thread": {"type": "create"}}, "thread"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": "a", "fallbacks": []}, "fallbacks"),
        ("messages", {"messages": [USER], "compaction": {"type": "auto"}}, "compaction"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "text", "data": "x"},
                                "citations": {"enabled": True},
                            }
                        ],
                    }
                ]
            },
            "citations",
        ),
    ],
)
async def test_what_asks_for_something_that_is_not_done_is_refused_by_name(
    endpoint: str, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await prompt_of(endpoint, body)


def test_a_thread_is_refused_so_that_anthropics_client_goes_on_without() -> None:
    for kind in ("create", "continue"):
        for cls, needed in ((MessagesBody, {"max_tokens": 1}), (CountBody, {})):
            with pytest.raises(NoThreads) as caught:
                parse_body(cls, {"messages": [USER], "thread": {"type": kind}, **needed})
    assert caught.value.details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_what_asks_for_nothing_of_messages_is_ignored_and_older_names_are_read() -> None:
    fields = {"fallbacks": [{"model": "x"}], "billing_policy": {}, "fallback_credit_token": "x", "thread": None}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    demand = parse_body(MessagesBody, {"messages": [USER], "max_tokens": 1, "output_format": schema, **fields}).demand(
        "a"
    )
    assert demand.output is not None and demand.output.param == "output_format.schema"
    parse_body(CountBody, {"messages": [USER], "max_tokens": 5, "stop_sequences": ["x"], "metadata": {"user_id": "u"}})
    tokenized = {"messages": [USER, called('{"x'), result()], "documents": [{"text": "x"}]}
    (chat,) = parse_body(TokenizeBody, tokenized).demand("id").prompts
    assert chat.documents == ({"text": "x"},)
