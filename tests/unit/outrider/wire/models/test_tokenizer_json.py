"""tokenizer.json of a stranger, and the special tokens of its configuration."""

import json
from pathlib import Path

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import MAX_QUOTED, MAX_TOKEN_ID, fields_of, load_tokenizer, read_special_tokens
from tests.stack import DEMO_TARGET

DEMO = json.loads((Path(DEMO_TARGET) / "tokenizer.json").read_text())


def test_a_tokenizer_neither_truncates_nor_pads() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(json.dumps({**DEMO, "truncation": truncation}).encode())
    assert tokenizer.truncation is tokenizer.padding is None
    assert len(tokenizer.encode("def f(x): return x").ids) > 2
    assert fields_of(None) is None and "type" in (fields_of(tokenizer.decoder) or {})


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"model": 1}', json.dumps({**DEMO, "model": {}}).encode()])
def test_what_is_no_tokenizer_is_refused_with_the_remedy(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^my\.json cannot be used: .+; take it from the model's folder") as refused:
        load_tokenizer(data, "my.json")
    assert refused.value.param == "model" and "\n" not in refused.value.message
    assert len(refused.value.message) < MAX_QUOTED + 200


def test_ids_have_a_bound() -> None:
    vocab = {"a": 0, "<unk>": MAX_TOKEN_ID}
    file = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}
    assert load_tokenizer(json.dumps(file).encode()).token_to_id("<unk>") == MAX_TOKEN_ID
    vocab["<unk>"] += 1
    with pytest.raises(ConfigError, match=r"has a token of id 1048576, and ids go up to 1048575$"):
        load_tokenizer(json.dumps(file).encode())


def test_special_tokens_come_in_transformers_order_and_then_the_models_own() -> None:
    config = {
        "image_token": {"content": "<image>"},
        "eos_token": {"content": "</s>", "lstrip": False},
        "bos_token": "<s>",
        "pad_token": None,
        "mask_token": {"text": "no content"},
        "chat_template": "no token",
        "extra_special_tokens": {"tool": "<tool>", "number": 5},
    }
    found = read_special_tokens(json.dumps(config).encode())
    assert list(found.items()) == [
        *(("bos_token", "<s>"), ("eos_token", "</s>")),
        *(("image_token", "<image>"), ("tool", "<tool>")),
    ]
    assert read_special_tokens(b"") == {}
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is no JSON object"):
        read_special_tokens(b"[]")
