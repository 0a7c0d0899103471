"""Prompts as a chat model is given them in a training."""

from pathlib import Path

import pytest

from outrider.lab.models.alpha import tokenizer_of
from outrider.training.chats import prompt_ids
from outrider.wire.errors import ConfigError
from tests.tiny_models import tiny_llama


def test_a_chat_models_prompts_go_through_its_template(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "chats", hidden_size=8, num_layers=1)
    folder, raw = str(tmp_path / "chats"), prompt_ids(str(tmp_path / "chats"), ["hello"], is_raw=True)
    assert prompt_ids(folder, ["hello"], is_raw=False) == raw, "it has none"
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    (tmp_path / "chats" / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(folder)
    assert [tokenizer.decode(ids) for ids in prompt_ids(folder, ["hello"], is_raw=False)] == ["<user>hello<a>"]
    (long,) = prompt_ids(folder, ["hello " * 300], is_raw=False)
    text = tokenizer.decode(long)
    assert text.startswith("<user>") and text.endswith("hello <a>")
    assert prompt_ids(folder, ["hello"], is_raw=True) == raw
    (tmp_path / "chats" / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match="takes no user's message alone: no system; --raw trains"):
        prompt_ids(folder, ["hello"], is_raw=False)
