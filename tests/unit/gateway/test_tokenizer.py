"""The tokenizer against the library itself, and chat templates against transformers' own rendering."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokenizer import Tokenizer, read_tokenizer
from outrider.drafting.token_bytes import read_spelling
from outrider.v1.common_pb2 import TokenizerFiles
from outrider.wire.errors import ConfigError
from tests.rendering import InlineRenderers
from tests.unit.gateway.rounds.test_detokenizer import BYTE_LEVEL
from tests.unit.gateway.templates import files

DEMO = Path(__file__).parents[3] / "models/demo/target"
LIBRARY = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


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


def test_truncation_and_padding_of_the_file_are_off() -> None:
    library = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    tokenizer = Tokenizer(library.to_str(), {}, None)
    text = "a text of more than four tokens"
    assert tokenizer.encode(text) == LIBRARY.encode(text).ids
    assert tokenizer.encode("a") == LIBRARY.encode("a").ids
