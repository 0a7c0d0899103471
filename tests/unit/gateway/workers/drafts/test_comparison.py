"""Two tokenizers are compared in a process of their own, which really runs here."""

import json

import pytest

from gateway.workers.drafts import comparison
from gateway.workers.drafts.comparison import difference_between
from outrider.v1 import common_pb2 as pb


def files(*tokens: str) -> pb.TokenizerFiles:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return pb.TokenizerFiles(tokenizer_json=json.dumps({"model": {"vocab": vocabulary}}).encode())


async def test_the_first_difference_is_named() -> None:
    found = await difference_between(files("a", "b"), files("a", "c"))
    assert found == "id 1 is 'b' in the target and 'c' in the draft"


async def test_a_file_that_is_no_tokenizer_is_the_reason() -> None:
    sentence = await difference_between(files("a"), pb.TokenizerFiles(tokenizer_json=b"[]"))
    assert sentence.startswith("tokenizer.json (2 bytes) is not a tokenizers file")


async def test_a_comparison_that_takes_too_long_returns_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "TIMEOUT_S", 0.001)
    assert "were not compared within 0.001 s and 2 GiB" in await difference_between(files("a"), files("b"))
