"""The tokenizer against the library itself, and chat templates against transformers' own rendering."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.requests import bad_word_ids
from gateway.chat_template import template_of_files
from gateway.confined.pool import ConfinedPool, WorkFailed
from gateway.tokenizer import Tokenizer, read_tokenizer
from outrider.drafting.token_bytes import read_spelling
from outrider.v1.common_pb2 import TokenizerFiles
from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError
from tests.rendering import InlineRenderers, inline_template
from tests.unit.gateway.rounds.test_detokenizer import BYTE_LEVEL

DEMO = Path(__file__).parents[3] / "models/demo/target"
LIBRARY = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & clear."},
    {"role": "user", "content": "Grüße, “world”"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?\n"},
]


def files(config: dict[str, Any] | None = None, template: str = "") -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json=(DEMO / "tokenizer.json").read_bytes(),
        tokenizer_config_json=b"" if config is None else json.dumps(config).encode(),
        chat_template=template.encode(),
    )


@given(st.text(max_size=60))
def test_encode_and_decode_are_the_librarys(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert ids == LIBRARY.encode(text).ids
    assert BYTE_LEVEL.decode(ids) == LIBRARY.decode(ids)


def test_token_bytes_joined_are_the_text() -> None:
    text = "naïve 日本 😀\n\tcode"
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(BYTE_LEVEL.token_bytes(token_id) or b"" for token_id in ids) == text.encode()
    assert any("\ufffd" in BYTE_LEVEL.token_text(token_id) for token_id in ids), "the text has characters that are cut"


def test_bad_words_are_tokenised_with_and_without_a_space() -> None:
    expected = (tuple(BYTE_LEVEL.encode("return")), tuple(BYTE_LEVEL.encode(" return")))
    assert bad_word_ids(["return", " return "], BYTE_LEVEL) == expected


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (TokenizerFiles(tokenizer_json=b"{}"), "tokenizer.json"),
        (TokenizerFiles(tokenizer_json=b"no json"), "tokenizer.json"),
        (TokenizerFiles(tokenizer_json=b"{}", tokenizer_config_json=b"[]"), "tokenizer_config.json"),
        (TokenizerFiles(tokenizer_json=b"{}", tokenizer_config_json=b"{"), "tokenizer_config.json"),
        (files(template="{% if %}"), "chat_template.jinja has a syntax error at line 1"),
    ],
)
async def test_files_that_cannot_be_used_are_named(parts: TokenizerFiles, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await read_tokenizer(parts, None, InlineRenderers())


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    data = json.loads((DEMO / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    data["decoder"] = {"type": "Sequence", "decoders": [data["decoder"], strip]}
    with pytest.raises(ConfigError, match="ByteLevel together with"):
        Tokenizer(json.dumps(data), {}, None)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"normalizers": []}},
        {"normalizer": {"normalizers": [{"prepend": "a"}]}},
        {"normalizer": {"strip_left": True, "strip_right": True}},
        {"decoder": {"type": "Fuse", "decoders": 5}},
        {"decoder": {"type": "Fuse", "decoders": [{}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}], "normalizers": [{}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}], "normalizers": 5}},
    ],
)
def test_what_the_library_reads_is_served_as_it_reads_it(parts: dict[str, Any]) -> None:
    """Old files leave the types of normalizers out, and others have keys that mean nothing."""
    data = json.dumps(json.loads((DEMO / "tokenizer.json").read_text()) | parts)
    expected = tokenizers.Tokenizer.from_str(data).encode(" two  words").ids
    assert Tokenizer.from_files(TokenizerFiles(tokenizer_json=data.encode())).encode(" two  words") == expected
    assert read_spelling(data.encode()).num_texts, "workers read it as well"


def test_an_error_of_any_kind_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tokenizer.TextBounds.of", lambda data: data["no such key"])
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used: KeyError: 'no such key'"):
        Tokenizer.from_files(files())


def test_truncation_and_padding_of_the_file_are_off() -> None:
    library = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    tokenizer = Tokenizer(library.to_str(), {}, None)
    text = "a text of more than four tokens"
    assert tokenizer.encode(text) == LIBRARY.encode(text).ids
    assert tokenizer.encode("a") == LIBRARY.encode("a").ids


async def test_the_tokenizers_own_special_tokens_are_added_to_text_but_not_to_chats() -> None:
    data = json.loads((DEMO / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    data["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}})
    data["post_processor"]["special_tokens"] = {"<|endoftext|>": special}
    parts = files({"bos_token": "<|endoftext|>"}, "{{ bos_token }}{{ messages[0].content }}")
    parts.tokenizer_json = json.dumps(data).encode()
    tokenizer = await read_tokenizer(parts, None, InlineRenderers())
    assert tokenizer.template is not None
    chat = await tokenizer.template.render([{"role": "user", "content": "hi"}], True, {}, max_chars=100)
    assert tokenizer.encode("hi") == tokenizer.encode(chat, add_special_tokens=False)
    assert tokenizer.encode("hi")[0] == 0 != tokenizer.encode("hi")[1]


async def test_templates_know_the_special_tokens_that_a_model_names_itself() -> None:
    own = {"tool_token": "<t>", "extra_special_tokens": {"boi": {"content": "<b>"}, "messages": "taken"}}
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True, **own}
    parts = files(config, "{{ bos_token }}{{ tool_token }}{{ boi }}")
    tokenizer = await read_tokenizer(parts, None, InlineRenderers())
    assert tokenizer.template is not None
    assert await tokenizer.template.render([{"role": "user", "content": "hi"}], True, {}, max_chars=100) == "<s><t><b>"
    assert "add_bos_token" not in tokenizer.special_tokens


# --- chat templates ----------------------------------------------------------------------------------------------

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


async def test_developer_is_system_where_a_template_does_not_know_it() -> None:
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
