"""What is said of a text that is not tokenised whole: that it is too long, and what its last ids are."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from gateway.text_bounds import SPLIT_REGEXES
from gateway.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "models/demo/target/tokenizer.json"
WORDS = ["the", "fox", "a", "b", "12345", "1", " ", "  ", "\n", "\u00e9", "e\u0301", "\u1f82", "x.y", "<m>"]
WORDS += ["\u65e5", "\U0001f600", "<0x0A>", " the fox", " runs "]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=80).map("".join)


def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO))


def made(change: dict[str, Any] | None = None, *added: AddedToken, **parts: Any) -> Tokenizer:
    """Return the demo's tokenizer with other parts. change: of its model."""
    base = library()
    for name, part in parts.items():
        setattr(base, name, part)
    base.add_special_tokens(list(added))
    data = json.loads(base.to_str())
    data["model"] |= change or {}
    return Tokenizer(json.dumps(data), {}, None)


def sentencepiece(*added: AddedToken, fuse_unk: bool = True, **parts: Any) -> Tokenizer:
    """Return a tokenizer with bytes to fall back on."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "▁the", "1", "▁▁"]
    merges = [("t", "h"), ("▁", "th"), ("▁", "▁")]
    vocab = {text: index for index, text in enumerate([*texts, "▁th"])}
    del vocab["▁the"]
    vocab = {text: index for index, text in enumerate(vocab)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=True)
    base = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(base, name, part)
    base.add_special_tokens(list(added))
    return Tokenizer(base.to_str(), {}, None)


def unigram(fallback: bool) -> Tokenizer:
    texts = ["<unk>", "▁", "▁the", "t", "h", "e", "▁fox", *(f"<0x{byte:02X}>" for byte in range(256))]
    base = tokenizers.Tokenizer(models.Unigram([(text, -1.0 * i) for i, text in enumerate(texts)], 0, fallback))
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(base.to_str(), {}, None)


def word_piece() -> Tokenizer:
    base = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##e": 2, "t": 3, "##h": 4}, unk_token="[UNK]"))
    base.normalizer, base.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return Tokenizer(base.to_str(), {}, None)


def split(regex: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


LLAMA, QWEN = sorted(SPLIT_REGEXES, key=len, reverse=True)
BOUNDED_AND_CUT = {
    "demo": lambda: made(),
    "llama 3": lambda: made(pre_tokenizer=split(LLAMA)),
    "qwen": lambda: made(pre_tokenizer=split(QWEN), normalizer=normalizers.NFC()),
    "mask": lambda: made(None, AddedToken("<m>", lstrip=True, rstrip=True)),
    "own tokens": lambda: made(
        None,
        AddedToken("<m>"),
        post_processor=processors.TemplateProcessing(single="<m> $A <m>", special_tokens=[("<m>", 4096)]),
    ),
    "metaspace": lambda: sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace()),
    "unigram with bytes": lambda: unigram(True),
    "unknown": lambda: made({"unk_token": "the", "vocab": {"the": 0, "t": 1}, "merges": []}),
    "digits first": lambda: made(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    ),
}
"""Tokenizers of which both is known."""
BOUNDED = {
    "llama 2": lambda: sentencepiece(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "own split": lambda: made(pre_tokenizer=split(r".{5}")),
    "token of two words": lambda: made(None, AddedToken("fox a", special=False)),
}
CUT = {"word piece": word_piece, "unigram": lambda: unigram(False)}
NEITHER = {
    "strips accents": lambda: made(normalizer=normalizers.StripAccents(), pre_tokenizer=split(r".{5}")),
    "drops": lambda: made(normalizer=normalizers.Replace("the", ""), pre_tokenizer=split(r".{5}")),
    "removes": lambda: made(pre_tokenizer=pre_tokenizers.Split("the", "removed")),
    "leaves out": lambda: made({"vocab": {"the": 0, "t": 1}, "merges": []}, pre_tokenizer=split(r".{5}")),
    "fuses": lambda: made(
        {"unk_token": "the", "vocab": {"the": 0, "t": 1}, "merges": [], "fuse_unk": True}, pre_tokenizer=split(r".{5}")
    ),
}
KINDS = {**BOUNDED_AND_CUT, **BOUNDED, **CUT, **NEITHER}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_of_a_tokenizer(kind: str) -> None:
    bounds = tokenizer_of(kind).bounds
    assert (bounds.max_token_chars is not None) == (kind in BOUNDED_AND_CUT or kind in BOUNDED)
    assert bounds.splits_at_spaces == (kind in BOUNDED_AND_CUT or kind in CUT)


@given(TEXTS, st.integers(1, 4))
def test_a_text_is_too_long_only_if_it_is_and_its_last_ids_are_those_of_the_whole(text: str, num_ids: int) -> None:
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode(text)
        assert tokenizer.bounds.may_fit(text, num_ids) or len(ids) > num_ids, kind
        assert tokenizer.last_ids(text, num_ids) == ids[-num_ids:], kind


def test_of_a_long_text_only_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made()
    text = "the quick brown fox " * 10_000
    expected = tokenizer.encode(text)[-10:]
    seen: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, special: seen.append(len(text)) or encode(text, special))
    assert tokenizer.last_ids(text, 10) == expected
    assert sum(seen) < 1000
