"""Messages as a template takes them: merged, in turns, with tools and without."""

import pytest

from gateway.tools.offer import Tool
from outrider.wire.errors import InvalidRequest
from tests.rendering import inline_template
from tests.unit.gateway.api.schemas.prompts_of import USER, called, chat_of, prompt_of, result, said, system

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


ADD = Tool("add-2", parameters={"type": "object", "properties": {"a": {"type": "number"}}})


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
def test_a_template_that_writes_the_text_alone_marks_no_roles(source: str, marks: bool) -> None:
    assert inline_template(source).marks_roles is marks


async def test_the_template_named_tool_use_is_taken_for_tools() -> None:
    template = inline_template("plain", tool_use="{{ tools[0].function.name }}")
    assert await template.render([], True, {}, max_chars=100) == "plain"
    assert await template.render([], True, {}, [ADD.for_template()], max_chars=100) == "add-2"
    assert template.accepts_tools and not inline_template("{{ messages }} tools").accepts_tools


async def test_tools_in_a_system_message_stay_where_messages_are_rewritten() -> None:
    source = (
        "{% for m in messages %}{% if loop.previtem and m.role == loop.previtem.role %}{{ raise_exception('roles') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% for tool in m.tools or [] %}<{{ tool.function.name }}>{% endfor %}"
        "{% endfor %}"
    )
    text = await inline_template(source).render([USER, USER], False, {}, [ADD.for_template()], max_chars=1000)
    assert text == "[system]<add-2>[user]a\n\na"


async def test_a_template_that_takes_one_call_a_message_gets_each_with_its_result() -> None:
    source = (
        "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ message.tool_calls[0].function.name }} {{ message.content }}"
        "{% else %}{{ message.content }}{% endif %};{% endfor %}"
    )
    calls = []
    results: list[dict[str, str]] = []
    for name in ("a", "b"):
        calls.append({"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}})
        results.insert(0, {"role": "tool", "tool_call_id": name, "content": f"of {name}"})
    called_both = {"role": "assistant", "content": "Well.", "tool_calls": calls}
    template = inline_template(source)
    text = await template.render([called_both, *results], False, {}, max_chars=1000)
    assert text == "a Well.;of a;b ;of b;"
    del results[0]["tool_call_id"]
    unknown = {"role": "tool", "tool_call_id": "c", "content": "more"}
    assert await template.render([called_both, *results, unknown], False, {}, max_chars=1000) == (
        "a Well.;of a;b ;of b;more;"
    )
    del results[1]["tool_call_id"]
    text = await template.render([called_both, *results], False, {}, max_chars=1000)
    assert text == "a Well.;of b;b ;of a;", "in the order in which they stand"
