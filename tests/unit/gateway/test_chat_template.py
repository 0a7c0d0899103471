"""Chat templates against transformers' own rendering, and which of them is taken."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.chat_template import template_of_files
from gateway.confined.pool import ConfinedPool, WorkFailed
from gateway.tokenizer import read_tokenizer
from outrider.wire.errors import InvalidRequest, OutriderError
from tests.rendering import InlineRenderers, inline_template
from tests.unit.gateway.templates import files

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & clear."},
    {"role": "user", "content": "Grüße, “world”"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?\n"},
]


async def test_templates_get_the_special_tokens_that_a_model_names_itself() -> None:
    own = {"tool_token": "<t>", "extra_special_tokens": {"boi": {"content": "<b>"}, "messages": "taken"}}
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True, **own}
    parts = files(config, "{{ bos_token }}{{ tool_token }}{{ boi }}")
    tokenizer = await read_tokenizer(parts, None, InlineRenderers())
    assert tokenizer.template is not None
    assert await tokenizer.template.render([{"role": "user", "content": "hi"}], True, {}, max_chars=100) == "<s><t><b>"
    assert "add_bos_token" not in tokenizer.special_tokens


TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{% endif %}"
    ),
    "tojson": "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ messages[0].content }}",
    "blocks": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% continue %}{% endif %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    ),
    "date": "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}{{ undefined_name }}",
    "names": "{% if enable_thinking %}think{% else %}do not{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
async def test_templates_render_as_in_transformers(name: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [CHAT], chat_template=TEMPLATES[name], add_generation_prompt=prompt, enable_thinking=True, **special
    )
    template = inline_template(TEMPLATES[name], special)
    assert await template.render(CHAT, prompt, {"enable_thinking": True}, max_chars=1000) == expected[0]


async def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return await inline_template(source).render(messages, True, {}, max_chars=1000)


async def test_a_template_may_refuse_and_is_sandboxed() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        await rendered("{{ raise_exception('roles must alternate') }}", CHAT)
    assert caught.value.param == "messages"
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}", "{{ lipsum() }}"):
        with pytest.raises(InvalidRequest):
            await rendered(source, CHAT)


async def test_a_template_whose_renderer_fails_is_our_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        async def run(self, caller: bytes, request: Any) -> Any:
            raise WorkFailed("the process ended with 7")

    template = replace(inline_template("{{ messages }}"), name="chat_template.jinja", renderers=Failing())
    with pytest.raises(OutriderError, match="the gateway's log has the place") as caught:
        await template.render(CHAT, True, {}, max_chars=100)
    assert caught.value.http_status == 500
    assert "chat_template.jinja could not be rendered: the process ended with 7" in caplog.text


async def test_values_that_nest_too_deep_for_a_template_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    template = replace(inline_template("{{ messages }}"), renderers=ConfinedPool("none", 1.0))
    with pytest.raises(InvalidRequest, match="nest too deep"):
        await template.render(CHAT, True, {"deep": deep}, max_chars=100)


async def test_developer_is_system_where_a_template_has_no_such_role() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert await rendered("{{ messages[0].role }}", messages) == "system"
    assert await rendered("{# developer #}{{ messages[0].role }}", messages) == "developer"


async def test_which_template_is_taken() -> None:
    listed = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, {"name": "x"}, 5]
    named = {"tool_use": "t", "default": "d", "other": "o", "rag": 5}
    additional = {"tool_use": b"T"}
    for found, sources in (
        (template_of_files(b"f", listed, None), ("f", {})),
        (template_of_files(b"", "c", None), ("c", {})),
        (template_of_files(b"", listed, None), ("d", {"tool_use": "t"})),
        (template_of_files(b"", named, None), ("d", {"tool_use": "t"})),
        (template_of_files(b"f", None, None, additional), ("f", {"tool_use": "T"})),
        (template_of_files(b"", "c", None, additional), ("c", {"tool_use": "T"})),
        (template_of_files(b"f", None, "own", additional), ("own", {})),
    ):
        assert found is not None and (found.source, found.named) == sources
    assert template_of_files(b"", {"tool_use": "t"}, None) is None
    for override in (None, "theirs"):
        tokenizer = await read_tokenizer(files({"chat_template": "own"}), override, InlineRenderers())
        assert tokenizer.template is not None and tokenizer.template.source == (override or "own")
    assert (await read_tokenizer(files(), None, InlineRenderers())).template is None
