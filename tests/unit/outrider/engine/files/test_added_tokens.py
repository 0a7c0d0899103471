"""Tokens that other files of a folder list beside tokenizer.json."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.tokenizer import Tokenizer
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.files.folders import TEXT, change

TOOL = {"content": "<|tool|>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}


THINK = {**TOOL, "content": "</think>", "rstrip": False}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"301": {**THINK}, "300": {**TOOL, "special": True}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"0": {**TOOL, "content": "</s>", "special": False}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"68": {**THINK, "content": "b", "special": True}}}},
        {"added_tokens.json": {"</think>": 301, "<|tool|>": 300}},
        {
            "tokenizer_config.json": {"bos_token": None, "eos_token": None},
            "special_tokens_map.json": {
                "bos_token": "[x]",
                "eos_token": {"content": "</s>"},
                "additional_special_tokens": ["<|tool|>", "</think>"],
            },
            "added_tokens.json": {"[x]": 300},
        },
        {"tokenizer_config.json": {"extra_special_tokens": {"tool_token": "<|tool|>"}, "pad_token": "[x]"}},
        {"tokenizer_config.json": {"extra_special_tokens": ["</think>", "b"]}},
    ],
)
def test_tokens_that_tokenizer_json_does_not_list_are_those_of_transformers(
    folder: Path, files: dict[str, dict[str, Any]]
) -> None:
    for name, fields in files.items():
        change(folder / name, **fields)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_files(tokenizer_files(str(folder)))
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    for skips in (True, False):
        assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert ours.special_tokens == theirs.special_tokens_map
    for token_id in range(len(theirs)):
        assert ours.token_name(token_id) == theirs.convert_ids_to_tokens(token_id)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"310": TOOL}}, r"'<\|tool\|>' as 310, .* would be 300"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": TOOL}}, r"'<\|tool\|>' as 5, .* would be 300"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": TOOL}}, r"added_tokens_decoder\['x'\] is"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": "<x>"}}, r"added_tokens_decoder\['300'\] is '<x>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": [TOOL]}, r"added_tokens_decoder is \["),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: TOOL}}, r"added_tokens_decoder\['999"),
        ("tokenizer_config.json", {"image_token": "\ud800"}, r"list '\\ud800', which is no text in UTF-8"),
        ("added_tokens.json", {"<x>": "300"}, r"added_tokens.json .* '<x>' is '300'"),
    ],
)
def test_a_token_that_cannot_be_what_it_is_listed_as_is_refused_by_name(
    folder: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    change(folder / name, **fields)
    with pytest.raises(ConfigError, match=message):
        tokenizer_files(str(folder))
