"""Equal fingerprints mean equal ids; a difference is named by its first id."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference, tokenizer_fingerprint

DEMO = Path(__file__).parents[5] / "models" / "demo"


def document(vocab: Any, added: list[tuple[int, str, bool]] = ()) -> bytes:  # type: ignore[assignment]
    tokens = [{"id": i, "content": text, "special": special} for i, text, special in added]
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}).encode()


def test_the_demo_pair_agrees() -> None:
    target, draft = ((DEMO / side / "tokenizer.json").read_bytes() for side in ("target", "draft"))
    assert tokenizer_fingerprint(target) == tokenizer_fingerprint(draft)
    assert first_difference(target, draft) is None


def test_order_in_the_file_does_not_count_but_ids_do() -> None:
    a, b = document({"x": 0, "y": 1}), document({"y": 1, "x": 0})
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(b) and first_difference(a, b) is None
    assert tokenizer_fingerprint(a) != tokenizer_fingerprint(document({"x": 1, "y": 0}))


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (document({"Ġfoo": 17}), document({"Ġbar": 17}), "id 17 is 'Ġfoo' in the target and 'Ġbar' in the draft"),
        (document({"a": 0, "b": 1}), document({"a": 0}), "id 1 is 'b' in the target and missing in the draft"),
        (document({"a": 0}), document({"a": 0, "b": 1}), "id 1 is missing in the target and 'b' in the draft"),
        (
            document({"a": 0}, [(1, "<s>", True)]),
            document({"a": 0}, [(1, "<s>", False)]),
            "id 1 is the special token '<s>' in the target and '<s>' in the draft",
        ),
    ],
)
def test_the_first_difference_is_named(a: bytes, b: bytes, sentence: str) -> None:
    assert first_difference(a, b) == sentence
    assert tokenizer_fingerprint(a) != tokenizer_fingerprint(b)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"{}", b'{"model": {"vocab": {"a": "x"}}}', b'{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="is not a tokenizers file"):
        tokenizer_fingerprint(data)
