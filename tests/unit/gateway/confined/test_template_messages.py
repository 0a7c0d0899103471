"""Messages as a template takes them: merged, in turns, with tools and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.tools.offer import Tool
from outrider.wire.errors import InvalidRequest
from tests.rendering import inline_template
from tests.unit.gateway.api.schemas.prompts_of import PLAIN, called, prompt_of
from tests.unit.gateway.tools.answers import TEMPLATES
from tests.unit.gateway.tools.plans import SCHEMA

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
USER = {"role": "user", "content": "a"}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "b", **fields}


def result(content: Any = "failed", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **fields}


async def chat_of(*messages: dict[str, Any], template: str = PLAIN, **body: Any) -> str:
    return await prompt_of("chat", {"messages": list(messages), **body}, template)


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


DEMO = Path(__file__).parents[4] / "models/demo/target"
ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})
ROME, ADDED = ("weather", '{"city": "Rome", "days": 3}'), ("add-2", '{"a": 2.5}')
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "A tool knows.",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in (ROME, ADDED)
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    {"role": "user", "content": "Thanks."},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
    }
]


@pytest.mark.parametrize("name", ["hermes", "reasoning", "llama3", "mistral", "deepseek", "json", "demo"])
@pytest.mark.parametrize("offered", [True, False])
async def test_messages_go_through_templates_as_in_transformers(name: str, offered: bool) -> None:
    """Arguments as objects, tools as they came, and content an empty text where the template shows the calls so."""
    from transformers.utils.chat_template_utils import render_jinja_template

    path = DEMO / "chat_template.jinja" if name == "demo" else TEMPLATES / f"{name}.jinja"
    source = path.read_text(encoding="utf-8")
    body = {"messages": MESSAGES, "reasoning_effort": "low", "tools": TOOLS if offered else []}
    chat = parse_body(ChatBody, body).demand("id").prompts[0]
    told = [tool.for_template() for tool in chat.tools.tools]
    text = await inline_template(source).render(chat.messages, True, chat.template_kwargs, told, max_chars=1 << 20)
    plain = json.loads(json.dumps(MESSAGES))
    plain[1]["content"] = None if name == "deepseek" else ""
    for call in plain[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    expected, _ = render_jinja_template(
        [plain],
        tools=TOOLS if offered else None,
        chat_template=source,
        add_generation_prompt=True,
        reasoning_effort="low",
    )
    assert text == expected[0]
    assert ('"city": "Rome"' in text) and ("The weather." in text) == offered


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{% for message in messages %}{{ message.content }}\n{% endfor %}", False),
        ("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}", True),
        (
            "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}",
            True,
        ),
        ("{{ raise_exception('This model judges pairs of messages.') }}", True),
    ],
)
def test_a_template_that_writes_the_text_alone_marks_no_turns(source: str, marks: bool) -> None:
    assert inline_template(source).marks_turns is marks


async def test_the_template_named_tool_use_is_taken_for_tools() -> None:
    template = inline_template("plain", tool_use="{{ tools[0].function.name }}")
    assert await template.render([], True, {}, max_chars=100) == "plain"
    assert await template.render([], True, {}, [ADD.for_template()], max_chars=100) == "add-2"
    assert template.takes_tools and not inline_template("{{ messages }} tools").takes_tools


async def test_a_template_that_takes_one_call_a_message_gets_each_with_its_result() -> None:
    source = (
        "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ message.tool_calls[0].function.name }} {{ message.content }}"
        "{% else %}{{ message.content }}{% endif %};{% endfor %}"
    )
    calls = []
    results = []
    for name in ("a", "b"):
        calls.append({"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}})
        results.insert(0, {"role": "tool", "tool_call_id": name, "content": f"of {name}"})
    messages = [{"role": "assistant", "content": "Well.", "tool_calls": calls}, *results]
    text = await inline_template(source).render(messages, False, {}, max_chars=1000)
    assert text == "a Well.;of a;b ;of b;"
