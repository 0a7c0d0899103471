"""Derives limits from a tokenizer.json: how few tokens a text can have, and where it may be cut before tokenisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

Json = dict[str, Any]

NORMALIZED_CHARS = 4
"""Maximal number of characters that a Unicode normal form composes into one. U+1F82, for example, is composed of four.
"""
WHITE_SPACE = tuple(char for char in map(chr, range(0x3001)) if char.isspace())
SEARCHED_CHARS = 1000
"""Number of characters before a position that are searched for a space between two letters, at which a text can be cut.
Prose has one in every 20 characters. If there is none, the tokenizer tries a position twice as far from the text's end.
"""
SPLIT_REGEXES = frozenset(
    {
        # Llama 3, as cl100k
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
    }
)
"""Regular expressions of pre-tokenizers that never match a letter followed by a space, and that have no look-behind."""


@dataclass(frozen=True, slots=True)
class TextBounds:
    """Properties of a tokenizer that limit the lengths of its texts in characters and tokens."""

    max_token_chars: int | None
    """Maximal number of characters that become one token; None if there is no limit."""
    drops_spaces: bool
    """Whether the tokenizer may drop white space. If so, only other characters count for `max_token_chars`."""
    splits_at_spaces: bool
    """Whether a text may be cut before a space between two letters, and its parts tokenised one by one, with the same
    result."""

    @classmethod
    def of(cls, data: Json) -> TextBounds:
        """Return the properties of a tokenizer. data: parsed content of its tokenizer.json."""
        added = data.get("added_tokens") or []
        normalizers = _parts(data.get("normalizer"))
        pre_tokenizers = _parts(data.get("pre_tokenizer"))
        contraction = _contraction(normalizers)
        max_token_chars: int | None = None
        if contraction is not None and _keeps_text(pre_tokenizers) and _covers_all(data, normalizers, pre_tokenizers):
            tokens = [*_vocabulary(data["model"]), *(token["content"] for token in added)]
            max_token_chars = max(map(len, tokens), default=0) * contraction or None
        has_space = any(" " in token["content"] for token in added)
        splits = not has_space and _splits_at_spaces(normalizers, pre_tokenizers)
        return cls(max_token_chars, _drops_spaces(added, normalizers, pre_tokenizers), splits)

    def max_chars(self, num_tokens: int) -> int | None:
        """Return the most characters, white space aside, that a text of `num_tokens` tokens can have; None without a
        limit.
        """
        if self.max_token_chars is None:
            return None
        return self.max_token_chars * num_tokens

    def max_text_chars(self, num_tokens: int) -> int | None:
        """Return the most characters, white space included, that a text of `num_tokens` tokens can have.

        None without a limit.
        """
        if self.drops_spaces:
            return None
        return self.max_chars(num_tokens)

    def may_fit(self, text: str, num_tokens: int) -> bool:
        """Return False if the text's length alone shows that it has more than `num_tokens` tokens; else True."""
        max_chars = self.max_chars(num_tokens)
        if max_chars is None or len(text) <= max_chars:
            return True
        return self.drops_spaces and len(text) - sum(map(text.count, WHITE_SPACE)) <= max_chars


def cut_before(text: str, position: int) -> int | None:
    """Return the position of the last space between two letters before `position`.

    None if there is none in the SEARCHED_CHARS characters before it.
    """
    begin = max(0, position - SEARCHED_CHARS)
    last: int | None = None
    for match in re.finditer("[A-Za-z](?= [A-Za-z])", text[begin:position]):
        last = begin + match.end()
    return last


_DROP_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_KEEP_TEXT = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength")
_KEEP_LETTERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "BertNormalizer")
"""Normalizers that keep a space between two letters, and that give the same result for the text before and after it."""


def _parts(described: Json | None) -> list[Json]:
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    parts: list[Json] = []
    for step in described.get("normalizers") or described.get("pretokenizers") or []:
        parts += _parts(step)
    return parts


def _contraction(normalizers: Iterable[Json]) -> int | None:
    """How many characters of a text become one character, at most; None for any number.

    # NFC and the replacement of "--" by "-": 4 * 2 = 8
    """
    product = 1
    for part in normalizers:
        kind = part["type"]
        if kind in ("NFC", "NFKC"):
            product *= NORMALIZED_CHARS
        elif kind == "Replace":
            pattern = part["pattern"].get("String")
            content = part["content"]
            if not pattern or not content or content.isspace():
                return None
            product *= -(-len(pattern) // len(content))
        elif kind not in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Strip"):
            return None
    return product


def _drops_spaces(added: Iterable[Json], normalizers: Iterable[Json], pre_tokenizers: Iterable[Json]) -> bool:
    for token in added:
        if token.get("lstrip") or token.get("rstrip"):
            return True
    for part in normalizers:
        if part["type"] == "Strip":
            return True
    return any(part["type"] in _DROP_SPACES for part in pre_tokenizers)


def _keeps_text(pre_tokenizers: Iterable[Json]) -> bool:
    for part in pre_tokenizers:
        if part["type"] in ("Split", "Punctuation"):
            if part.get("behavior", "Isolated") == "Removed":
                return False
        elif part["type"] not in (*_DROP_SPACES, *_KEEP_TEXT):
            return False
    return True


def _vocabulary(model: Json) -> list[str]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return list(vocab)
    return [entry[0] for entry in vocab]  # of a Unigram: pairs of a token and its score


def _covers_all(data: Json, normalizers: list[Json], pre_tokenizers: list[Json]) -> bool:
    # No character may be left out, and no run of unknown characters may become one token.
    model = data["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    vocab = set(_vocabulary(model))
    if model.get("byte_fallback") and vocab.issuperset(f"<0x{byte:02X}>" for byte in range(256)):
        return True
    if model["type"] == "Unigram":
        return False
    has_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    if has_byte_level and vocab.issuperset(ByteLevel.alphabet()):
        return True
    return model.get("unk_token") in vocab and not model.get("fuse_unk")


def _splits_at_spaces(normalizers: Iterable[Json], pre_tokenizers: Iterable[Json]) -> bool:
    for part in normalizers:
        if part["type"] not in _KEEP_LETTERS:
            return False
    for part in pre_tokenizers:
        kind = part["type"]
        if kind in _DROP_SPACES:
            return True
        if kind == "ByteLevel" and part.get("use_regex", True):
            return True
        if kind == "Metaspace" and part.get("split", True):
            return True
        if kind == "Split" and part["pattern"].get("Regex") in SPLIT_REGEXES:
            return True
        if kind not in ("Digits", "Punctuation"):
            return False  # it may have its own idea of where pieces begin
    return False
