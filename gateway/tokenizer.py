"""Text to token ids and back, on the `tokenizers` library. Used by the front ends and by the decode loop.

transformers would import torch; the files of a checkpoint's tokenizer are read here instead (they come from the target
worker, so the gateway needs no model folder).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from gateway.chat import ChatTemplate, Message, find_template
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, InvalidRequest

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Piece = bytes | str | None
"""What a token adds to a text: raw bytes of UTF-8; text whose spacing depends on its neighbours; or nothing."""


class Tokenizer:
    """One model's tokenizer. Raises ConfigError, naming the file, when the files cannot be used."""

    def __init__(self, tokenizer_json: str, special_tokens: dict[str, str], template: ChatTemplate | None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            decoder = json.loads(tokenizer_json).get("decoder")
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"tokenizer.json cannot be read: {error}; take it from the model's folder") from None
        self._tokenizer.no_truncation()  # lengths are checked against the model's context, never cut silently
        self._tokenizer.no_padding()
        self.special_tokens = special_tokens
        self.template = template
        added = self._tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(token.content for token in added.values() if token.special)
        self._byte_level, self._byte_fallback = _byte_rules(decoder)
        self._pieces: dict[int, Piece] = {}

    @classmethod
    def from_files(cls, files: pb.TokenizerFiles, chat_template_override: str | None = None) -> Tokenizer:
        """`chat_template_override` is the text of a Jinja template that replaces the tokenizer's own."""
        config = _config_of(files.tokenizer_config_json)
        special = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
        own = find_template(files.chat_template.decode("utf-8"), config.get("chat_template"))
        source = own if chat_template_override is None else chat_template_override
        template = None if source is None else ChatTemplate(source, special)
        return cls(files.tokenizer_json.decode("utf-8"), special, template)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included; a model's logits may be wider."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokenizer's own post-processor adds its special tokens. Releases the GIL, unlike the library's `encode`.

        Raises InvalidRequest when `text` is no Unicode text (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"text holds a lone surrogate at character {error.start}; send valid Unicode"
            ) from None
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, names: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The messages through the chat template. Raises InvalidRequest when there is none or it refuses them.

        `names` are more variables for the template, such as enable_thinking.
        """
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or start the gateway with --chat-template",
                param="messages",
            )
        return self.encode(self.template.render(messages, add_generation_prompt, names or {}), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens and ids past the vocabulary add nothing; bytes that are no UTF-8 show as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def piece(self, token_id: int) -> Piece:
        """What `token_id` adds to a decoded text. Cached: at most one entry per id of the vocabulary."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._tokenizer.id_to_token(token_id)
            piece = None if token is None or token in self._silent else self._piece_of(token)
            if token is not None:
                self._pieces[token_id] = piece
            return piece

    def _piece_of(self, token: str) -> Piece:
        if self._byte_level:
            codes = [_BYTE_OF_CHAR.get(char) for char in token]
            known = bytes(code for code in codes if code is not None)
            return known if len(known) == len(codes) else token.encode("utf-8")
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Turns `bytes` pieces into text as `decode` would: byte fallback marks each bad byte, ByteLevel each run."""
        return codecs.getincrementaldecoder("utf-8")("outrider-each" if self._byte_fallback else "replace")

    def token_text(self, token_id: int) -> str:
        """The token's own text, special tokens by name; parts of a UTF-8 character show as U+FFFD."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        if piece is None:
            return self._tokenizer.id_to_token(token_id) or ""
        before = self.decode(self._anchor)  # in front of nothing, many decoders drop a token's leading space
        return self.decode([*self._anchor, token_id])[len(before) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes; None for an id past the vocabulary."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece
        text = self.token_text(token_id)
        return text.encode("utf-8") if text or piece is not None else None

    @cached_property
    def _anchor(self) -> list[int]:
        """One id whose text is a plain word, to stand before another token."""
        for token_id in range(self.vocab_size):
            if isinstance(self.piece(token_id), str) and self.decode([token_id]).strip().isalnum():
                return [token_id]
        return []


def _byte_rules(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """(every token is bytes, `<0xNN>` tokens are bytes). Raises ConfigError for a chain that cannot be streamed."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and not kinds <= {"ByteLevel", "Fuse"}:
        raise ConfigError(
            f"tokenizer.json decodes with {sorted(kinds)}; ByteLevel together with others cannot be streamed"
        )
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def _config_of(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data or b"{}")
    except ValueError as error:
        raise ConfigError(f"tokenizer_config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"tokenizer_config.json holds a {type(config).__name__}, must hold an object")
    return config


def _content(token: Any) -> str | None:
    """A special token as tokenizer_config.json spells it: text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 is itself, the others count up from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_BYTE_OF_CHAR = _byte_alphabet()
codecs.register_error("outrider-each", _replace_each)
