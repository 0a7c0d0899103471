"""Each kind of chat template, of our own making, against transformers' `apply_chat_template`: the same text, for what a
client sends over HTTP.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.tokenizer import read_tokenizer
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.wire.errors import InvalidRequest
from tests.rendering import InlineRenderers, inline_template
from tests.service.scripted_generator import DEMO
from tests.unit.gateway.confined.kinds import TOOL, expected, loop, rendered

USER = {"role": "user", "content": "Weather in Rome?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "sunny"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
DOCUMENTS = [{"title": "Rome", "text": "It is sunny."}]
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
NULLS = {
    "membership": "{% if '</think>' in m.content %}thought{% endif %}{{ m.content }}",
    "loop": "{% for char in m.content %}{{ char }}{% endfor %}",
    "concatenation": "{{ m.content + '|' }}",
    "length": "{% if m.content | length > 0 %}{{ m.content }}{% endif %}",
    "printed": "{{ m.content }}",
    "is none": "{% if m.content is none %}nothing{% else %}{{ m.content }}{% endif %}",
}
"""How templates read a content that was null, beside calls that they show in any case."""
TEXT_ARGUMENTS = loop(
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name + c.function.arguments + '>' }}{% endfor %}"
)
PRINTED_ARGUMENTS = loop(
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
)
CALLS_BESIDE_NULL = loop("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}")
BOTH = loop(
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
PARTS_ALONE = {
    "loop": loop("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"),
    "selectattr": loop("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"),
    "index": loop("{{ m.content[0].text }}"),
    "system alone": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0]['text'] }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}",
}


def written(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as clients send them: with arguments as text, and null where there is no text beside calls."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = None
    return found


@pytest.mark.parametrize("kind", NULLS)
async def test_null_with_calls_is_an_empty_text(kind: str) -> None:
    template = loop(NULLS[kind] + CALLS)
    chat = [USER, CALLED, RESULT, USER]
    text = await rendered(template, written(chat))
    assert text == expected(template, chat) and '<weather {"city": "Rome"}>' in text
    assert "None" not in text and "nothing" not in text


async def test_null_stays_null_for_a_template_that_looks_for_calls_with_it() -> None:
    """`apply_chat_template` leaves null out, and such a template then finds no call: what is below it does not."""
    chat = [USER, {**CALLED, "content": None}, RESULT]
    (theirs,), _ = render_jinja_template([chat], chat_template=CALLS_BESIDE_NULL)
    text = await rendered(CALLS_BESIDE_NULL, written(chat))
    assert text == theirs and "<weather" in text


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS, PRINTED_ARGUMENTS])
async def test_arguments_are_texts_where_a_template_joins_or_prints_them(template: str) -> None:
    chat = [USER, CALLED, RESULT]
    sent = written(chat)
    theirs = [USER, {**sent[1], "content": ""}, RESULT]
    assert await rendered(template, sent) == expected(template, theirs)


async def test_arguments_are_texts_where_a_template_refuses_them_in_one_message_alone() -> None:
    joined = "{{ c.function.arguments + '' if c.id == 'odd' else c.function.arguments | tojson }}"
    template = loop("{{ m.content }}{% for c in m.tool_calls or [] %}" + joined + "{% endfor %}")
    sent = written([USER, {**CALLED, "tool_calls": [{**CALL, "id": "odd"}]}])
    assert '{"city": "Rome"}' in await rendered(template, sent)


@pytest.mark.parametrize("kind", PARTS_ALONE)
async def test_a_template_that_takes_parts_alone_gets_parts(kind: str) -> None:
    template = PARTS_ALONE[kind]
    theirs = [SYSTEM, USER]
    for message in theirs if kind != "system alone" else theirs[:1]:
        at = theirs.index(message)
        theirs[at] = {**message, "content": [{"type": "text", "text": message["content"]}]}
    text = await rendered(template, [SYSTEM, USER])
    assert text == expected(template, theirs) and "Be brief." in text and USER["content"] in text


async def test_results_are_parts_where_a_template_joins_arguments_and_writes_no_names() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    template = loop("{% for p in m.content %}{{ p.text }}{% endfor %}" + calls)
    text = await rendered(template, written([USER, CALLED, RESULT]))
    assert '[assistant]call {"city": "Rome"}' in text and text.endswith(f"[tool]{RESULT['content']}")


async def test_parts_are_joined_by_the_template_where_it_reads_them_and_else_by_newlines() -> None:
    chat = [{"role": "user", "content": PARTS}]
    assert await rendered(BOTH, chat) == expected(BOTH, chat) == "[user]onetwo"
    assert await rendered(loop("{{ m.content }}"), chat) == "[user]one\ntwo"


async def test_parts_are_read_without_tools_where_a_template_takes_texts_alone_with_them() -> None:
    template = BOTH + "{% if tools %}{{ messages[0].content + 'with tools' }}{% endif %}"
    chat = [{"role": "user", "content": PARTS}]
    assert await rendered(template, chat) == expected(template, chat)


async def test_documents_go_to_a_template_that_has_a_place_for_them() -> None:
    template = "{% for d in documents or [] %}<{{ d.title }}: {{ d.text }}>{% endfor %}" + loop("{{ m.content }}")
    theirs = expected(template, [USER], documents=DOCUMENTS)
    assert await rendered(template, [USER], documents=DOCUMENTS) == theirs
    assert await rendered(template, [USER], chat_template_kwargs={"documents": DOCUMENTS}) == theirs
    assert await rendered(template, [USER], documents=[]) == expected(template, [USER])
    for wrong in (
        {"documents": DOCUMENTS, "chat_template_kwargs": {"documents": [{}]}},
        {"chat_template_kwargs": {"documents": "x"}},
    ):
        with pytest.raises(InvalidRequest, match="documents"):
            await rendered(template, [USER], **wrong)
    with pytest.raises(InvalidRequest, match="has no place for them"):
        await rendered(loop("{{ m.content }}"), [USER], documents=DOCUMENTS)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
async def test_reasoning_has_the_name_that_a_template_reads(name: str) -> None:
    template = loop("{% if m." + name + " %}<think>{{ m." + name + " }}</think>{% endif %}{{ m.content }}" + CALLS)
    theirs = {**CALLED, "reasoning_content": "A tool knows.", name: "A tool knows."}
    text = await rendered(template, written([USER, {**CALLED, "reasoning_content": "A tool knows."}, RESULT]))
    assert text == expected(template, [USER, theirs, RESULT]) and "<think>A tool knows.</think>" in text


async def test_reasoning_is_left_out_where_a_template_refuses_it_with_text_and_calls() -> None:
    refusing = "{% if m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
    template = loop(refusing + "{{ m.thinking }}{{ m.content }}" + CALLS)
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    text = await rendered(template, [USER, {**written([said])[0], "content": "Let me see."}, RESULT])
    assert "Let me see.<weather" in text and "Hm." not in text


def save_named(folder: Path, form: str) -> None:
    """Save a tokenizer with named templates as transformers does, or in its configuration."""
    named = {
        "default": "{{ bos_token }}" + loop("{{ m.content }}"),
        "tool_use": "{{ tools | tojson }}" + loop("{{ m.content }}"),
    }
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"), bos_token="<|endoftext|>")
    theirs.chat_template = named
    theirs.save_pretrained(folder)
    if form == "files":
        assert (folder / "additional_chat_templates/tool_use.jinja").is_file(), "as transformers saves them"
    else:
        for path in (*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*")):
            path.unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        listed = [{"name": name, "template": source} for name, source in named.items()]
        settings["chat_template"] = listed if form == "list" else named
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("form", ["files", "list", "object"])
async def test_named_templates_and_tokens_of_a_folder(tmp_path: Path, form: str) -> None:
    save_named(tmp_path, form)
    ours = await read_tokenizer(tokenizer_files(str(tmp_path)), None, InlineRenderers())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ([TOOL], None):
        text = theirs.apply_chat_template([USER], tools=tools, tokenize=False, add_generation_prompt=True)
        assert await rendered(ours, [USER], tools=tools) == text


IN_LIST = "{% if m.tools %}{% for tool in m.tools %}<{{ tool.function.name }}>{% endfor %}{% endif %}"
IN_TEXT = "{% if 'tools' in m and m['tools'] is not none %}{{ '<' + m['tools'] + '>' }}{% endif %}"
XML_TOOLS = "{% for tool in xml_tools or [] %}<{{ tool.name }}>{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello."}


@pytest.mark.parametrize(
    ("source", "shown", "shown_alone"),
    [
        (loop("{{ m.content }}" + IN_LIST), "[system]Be brief.<weather>[user]Hello.", "[system]<weather>[user]Hello."),
        (
            loop("{{ m.content }}" + IN_TEXT),
            f"[system]Be brief.<{json.dumps([TOOL['function']])}>[user]Hello.",
            f"[system]<{json.dumps([TOOL['function']])}>[user]Hello.",
        ),
        (XML_TOOLS + loop("{{ m.content }}"), "<weather>[system]Be brief.[user]Hello.", "<weather>[user]Hello."),
        (
            "{{ tools[0].function.name if tools }}" + loop("{{ m.content }}" + IN_LIST),
            "weather[system]Be brief.[user]Hello.",
            "weather[user]Hello.",
        ),
    ],
    ids=["a list in the system message", "a text in the system message", "another variable", "tools, not a message's"],
)
async def test_tools_are_where_a_template_reads_them(source: str, shown: str, shown_alone: str) -> None:
    template = inline_template(source)
    assert template.accepts_tools
    assert await template.render([SYSTEM, HELLO], False, {}, [TOOL], max_chars=1000) == shown
    assert await template.render([HELLO], False, {}, [TOOL], max_chars=1000) == shown_alone
    assert await template.render([HELLO], False, {}, max_chars=1000) == "[user]Hello."


def test_a_template_that_writes_whole_messages_reads_no_tools_there() -> None:
    assert not inline_template("{{ messages | tojson }}").accepts_tools
