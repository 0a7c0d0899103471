"""The bytes that each token id of a tokenizer adds to a text, read from its tokenizer.json. Used by the gateway, which
streams text, and by the map between a draft's and a target's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import fields_of


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's printable characters for bytes: printable Latin-1 stands for itself, other bytes count up from U+0100.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = dict[str, int]()
    num_others = 0
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + num_others)] = byte
            num_others += 1
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer, in whose vocabulary each letter stands for a byte. An
    added token that contains another letter is encoded as UTF-8, all of it.
    """
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte of a byte-fallback token, which is spelled `<0xNN>`; None = it is another token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    return bytes.fromhex(token[3:5])


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes that a tokenizer's token ids stand for."""

    of: list[bytes | None]
    """UTF-8 bytes by token id; they need not be whole characters. None = the id stands for no text: a special token,
    the unknown token, or an id without a token."""
    fallback_ids: frozenset[int]
    """Ids of single-byte tokens that the tokenizer uses only where no other token fits."""

    @property
    def num_texts(self) -> int:
        """Number of token ids that stand for text."""
        return sum(map(bool, self.of))


def read_spelling(tokenizer_json: bytes) -> Spelling:
    """Return the bytes of all token ids of a tokenizer. `tokenizer_json`: content of the file tokenizer.json.

    Raises `ConfigError` for a tokenizer whose decoded text is not the concatenation of its tokens' bytes.
    """
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    model = json.loads(tokenizer_json)["model"]
    parts = _decoders(fields_of(tokenizer.decoder))
    kinds = [part["type"] for part in parts]
    is_byte_level = [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]
    has_fallback = "ByteFallback" in kinds
    replacements = list[tuple[str, str]]()
    if not is_byte_level:
        replacements = _replacements(parts)
    added = tokenizer.get_added_tokens_decoder()
    special_ids = {token_id for token_id, token in added.items() if token.special}
    vocab: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    unknown = vocab.get(model.get("unk_token") or "", model.get("unk_id"))
    of: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    fallback_ids = set[int]()
    for token, token_id in vocab.items():
        if token_id in special_ids or token_id == unknown:
            continue
        raw: bytes | None = None
        if has_fallback:
            raw = fallback_byte(token)
        if raw is not None:
            fallback_ids.add(token_id)
        elif is_byte_level:
            raw = byte_level(token)
        elif token_id in added:
            raw = token.encode()
        else:
            raw = _replace_all(token, replacements).encode()
        of[token_id] = raw
    return Spelling(of, frozenset(fallback_ids))


def _replace_all(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ConfigError("its tokenizer.json has no decoder: its tokens are parted by spaces that none of them holds")
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return parts


def _replacements(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for part in parts:
        kind = part["type"]
        pattern = part.get("pattern")
        if kind == "Metaspace":
            found.append((part["replacement"], " "))
        elif kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            found.append((pattern["String"], part["content"]))
        elif kind not in ("ByteFallback", "Fuse", "Strip"):  # these strip the beginning of a text
            raise ConfigError(
                f"its tokenizer.json decodes with {kind}, so that what a token adds depends on those beside it"
            )
    return found
