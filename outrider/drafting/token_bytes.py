"""The bytes that a tokenizer's ids add to a text, read from its tokenizer.json. Called by the gateway, which streams
them, and where a draft's tokens are mapped to a target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import described


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes: printable Latin-1 stands for itself, others count up from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token may be written in letters outside the byte alphabet."""
    known = bytes(_BYTE_OF_CHAR[char] for char in token if char in _BYTE_OF_CHAR)
    return known if len(known) == len(token) else token.encode()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte of a token `<0xNN>`; None for any other."""
    is_one = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return bytes.fromhex(token[3:5]) if is_one else None


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes of a tokenizer's ids."""

    of: list[bytes | None]
    """UTF-8 bytes by id, which need not be whole characters. None for special tokens and the unknown token, which stand
    for no text, and for ids that the tokenizer lacks."""
    fallback_ids: frozenset[int]
    """Ids of single bytes that are written only where no other token fits."""

    @property
    def num_texts(self) -> int:
        """Number of ids that stand for text."""
        return sum(1 for raw in self.of if raw)


def read_spelling(tokenizer_json: bytes) -> Spelling:
    """Read the bytes of all ids. Raises `ConfigError` where a token adds other bytes than its own."""
    tokenizer, document = Tokenizer.from_buffer(tokenizer_json), json.loads(tokenizer_json)
    parts = _decoders(described(tokenizer.decoder))
    is_byte_level = [part["type"] for part in parts if part["type"] != "Fuse"] == ["ByteLevel"]
    has_fallback = any(part["type"] == "ByteFallback" for part in parts)
    written = [] if is_byte_level else _replacements(parts)
    added = tokenizer.get_added_tokens_decoder()
    silent = {token_id for token_id, token in added.items() if token.special}
    vocab: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    model = document["model"]
    unknown = vocab.get(model.get("unk_token") or "", model.get("unk_id"))
    of: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    fallback_ids = set[int]()
    for token, token_id in vocab.items():
        if token_id in silent or token_id == unknown:
            continue
        raw = fallback_byte(token) if has_fallback else None
        if raw is not None:
            fallback_ids.add(token_id)
        elif is_byte_level:
            raw = byte_level(token)
        elif token_id in added:
            raw = token.encode()
        else:
            for old, new in written:
                token = token.replace(old, new)
            raw = token.encode()
        of[token_id] = raw
    return Spelling(of, frozenset(fallback_ids))


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ConfigError("its tokenizer.json has no decoder: its tokens are parted by spaces that none of them holds")
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return parts


def _replacements(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for part in parts:
        kind, pattern = part["type"], part.get("pattern")
        if kind == "Metaspace":
            found.append((part["replacement"], " "))
        elif kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            found.append((pattern["String"], part["content"]))
        elif kind not in ("ByteFallback", "Fuse", "Strip"):  # these strip the beginning of a text
            raise ConfigError(
                f"its tokenizer.json decodes with {kind}, so that what a token adds depends on those beside it"
            )
    return found
