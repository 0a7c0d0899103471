"""Encodes text to token ids and decodes them, with the `tokenizers` library. For front ends and the decode loop.

The files of a checkpoint's tokenizer are read here, because the transformers library would import torch. The target
worker sends the files, so the gateway needs no model folder.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from gateway.chat_template import ChatTemplate, Renderers, template_of_files
from gateway.control_tokens import ControlTokens
from gateway.text_bounds import TextBounds, cut_before
from gateway.text_trie import trie_pattern
from outrider.drafting.token_bytes import byte_level, fallback_byte
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.models.model_json import decode_text, parse_object
from outrider.wire.models.tokenizer_json import (
    MAX_QUOTED,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    fields_of,
    load_tokenizer,
    read_special_tokens,
)
from outrider.wire.peer_text import bound_text

BYTES_PER_TOKEN = 8
"""Bytes of a long text that are tokenised at first, for each token wanted; twice as many if they give too few tokens.
English text has about half as many bytes per token."""
CLEARLY_MORE = 1.25
"""A text is refused, and its rest is not tokenised, if its beginning has more than CLEARLY_MORE times the allowed
number of tokens. A factor near 1 is enough, because cutting a text changes only the tokens of one word."""
MAX_ADDED_TOKENS = 16
"""Maximal number of tokens that a post-processor adds to a text; known ones add one or two."""
REPLACES_EACH_BYTE = "outrider-each"
"""Name of a codecs error handler that replaces each invalid byte by U+FFFD."""
Piece = bytes | str | None
"""What a token adds to a decoded text: raw bytes of UTF-8, or text whose spacing depends on its neighbours, or nothing.
"""


class Tokenizer:
    """The tokenizer of one model, with its chat template. Raises ConfigError, which names an unusable file."""

    def __init__(self, tokenizer_json: str, special_tokens: dict[str, str], template: ChatTemplate | None) -> None:
        raw = tokenizer_json.encode()
        self._tokenizer = load_tokenizer(raw)  # which cuts nothing: lengths are checked against the model's context
        data = parse_object(raw, TOKENIZER_JSON)
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            data[name] = fields_of(getattr(self._tokenizer, name))
        self.bounds = TextBounds.of(data)
        self.special_tokens = special_tokens
        self.template = template
        self.tool_call_parser = "auto"
        """Name of the family of models in whose format tool calls are read; `auto` for the family that the chat
        template shows."""
        self.reasoning_parser = "auto"
        """Name of the family of models in whose format reasoning is read; `auto` for the family that the chat template
        shows."""
        added = self._tokenizer.get_added_tokens_decoder()
        silent: set[str] = set()
        special_ids: set[int] = set()
        self._controls: dict[str, int] = {}
        """Ids of control tokens, by their text."""
        for token_id, token in added.items():
            if token.special:
                silent.add(token.content)
                special_ids.add(token_id)
            if _is_control(token):
                self._controls[token.content] = token_id
        self._silent = frozenset(silent)
        """Texts of special tokens, which `decode` leaves out."""
        self.special_ids = frozenset(special_ids)
        self._byte_level, self._byte_fallback = _byte_rules(data["decoder"])
        self._pieces: dict[int, Piece] = {}
        """Pieces of the tokens that were decoded so far, by token id."""

    @classmethod
    def from_files(cls, files: pb.TokenizerFiles) -> Tokenizer:
        """Return the tokenizer that these files describe, without a chat template, which `read_tokenizer` adds."""
        special = read_special_tokens(files.tokenizer_config_json)
        text = decode_text(files.tokenizer_json, TOKENIZER_JSON)
        try:
            return cls(text, special, None)
        except ConfigError:
            raise
        except Exception as error:  # the library takes shapes that nobody has thought of
            why = bound_text(f"{type(error).__name__}: {error}", MAX_QUOTED)
            raise ConfigError(
                f"{TOKENIZER_JSON} cannot be used: {why}; take it from the model's folder, or save it again with "
                "PreTrainedTokenizerFast.save_pretrained"
            ) from None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens. A model may have more or fewer logits."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. add_special_tokens: whether the post-processor adds special tokens to it.

        It releases the GIL, unlike the library's `encode`. Raises InvalidRequest if `text` holds lone surrogates.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"text holds a lone surrogate at character {error.start}; send valid Unicode"
            ) from None
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def ids_within(self, text: str, max_ids: int, add_special_tokens: bool = True) -> list[int] | None:
        """Return the token ids of a text, or None if its beginning already has more than CLEARLY_MORE times `max_ids`.

        A text with too many ids is thus not tokenised as a whole. The result may have more than `max_ids`.
        """
        num_chars = _num_chars_read_first(text, max_ids)
        while num_chars < len(text):
            if len(self.encode(text[:num_chars], False)) > CLEARLY_MORE * max_ids:
                return None
            num_chars *= 2
        return self.encode(text, add_special_tokens)

    def encode_pieces(self, pieces: Sequence[str], add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text that is given in pieces, so that no token spans two pieces.

        # ["a<", "eos>b"]: "<eos>" is tokenised as text, not as the control token
        """
        first, *others = pieces
        ids = self.encode(first, False)
        for piece in others:
            at = self._first_added(piece)
            ids += self._middle.encode(piece[:at], add_special_tokens=False).ids
            ids += self.encode(piece[at:], False)  # from an added token on as in any text
        if not add_special_tokens:
            return ids
        return self._with_own(ids)

    def _first_added(self, text: str) -> int:
        if self._added is not None:
            match = self._added.search(text)
            if match is not None:
                return match.start()
        return len(text)

    def _with_own(self, ids: list[int]) -> list[int]:
        """Puts the tokens around `ids` that the post-processor puts around any text.

        # "a" is [7] without and [1, 7, 2] with them: [1, *ids, 2]
        """
        plain = self.encode("a", False)
        whole = self.encode("a", True)
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return [*whole[:at], *ids, *whole[at + len(plain) :]]
        return ids

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Texts of the control tokens: special tokens, and tokens in angle brackets."""
        return ControlTokens(self._controls)

    @cached_property
    def _added(self) -> re.Pattern[str] | None:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return trie_pattern((token.content for token in added if token.content), longest=True)

    @cached_property
    def _middle(self) -> tokenizers.Tokenizer:
        """Tokenizer of text in the middle of a text: it puts no space in front."""
        data = without_prefix_space(parse_object(self._tokenizer.to_str().encode(), TOKENIZER_JSON))
        return load_tokenizer(json.dumps(data).encode())

    def first_ids(self, text: str, num_ids: int) -> list[int]:
        """Return the first `num_ids` token ids of a text, without special tokens that the tokenizer would add.

        Only the beginning of a long text is tokenised, so the last of these ids may differ from those of the whole
        text.
        """
        num_chars = _num_chars_read_first(text, num_ids)
        ids = self.encode(text[:num_chars], False)
        while len(ids) < num_ids and num_chars < len(text):
            num_chars *= 2
            ids = self.encode(text[:num_chars], False)
        return ids[:num_ids]

    def last_ids(self, text: str, num_ids: int, add_special_tokens: bool = True) -> list[int]:
        """Return the last `num_ids` of the token ids that `encode` would return.

        Of a long text only the end is tokenised, if it can be cut at a space without changing the result.
        """
        num_chars = _num_chars_read_first(text, num_ids)
        while self.bounds.splits_at_spaces and num_chars < len(text):
            start = cut_before(text, len(text) - num_chars)
            num_chars *= 2
            if start is None:
                continue
            ids = self.encode(text[start:], add_special_tokens)
            # The first word may be another piece without the text before it; and there are the tokenizer's own tokens.
            first_word = text[start : text.find(" ", start + 1)]
            num_uncertain = len(first_word.encode()) + MAX_ADDED_TOKENS
            if len(ids) >= num_ids + num_uncertain:
                return ids[-num_ids:]
        return self.encode(text, add_special_tokens)[-num_ids:]

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token with this text; None for other texts.

        Grammars treat a control token as one token, never as its characters.
        """
        return self._controls.get(text)

    def silent_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, if `decode` leaves it out; else None."""
        if text not in self._silent:
            return None
        return self._controls.get(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD.

        Ids beyond the vocabulary add nothing, nor do special tokens if `skip_special_tokens` is True.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it, such as "Ġthe"; None for an id beyond the vocabulary."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def piece(self, token_id: int) -> Piece:
        """Return what a token adds to a decoded text: its bytes; or a text, whose spacing depends on its neighbours; or
        None for a special token that `decode` leaves out and for an id beyond the vocabulary. Results are cached by id.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return None
            piece = self._pieces[token_id] = self._piece_of(token)
            return piece

    def _piece_of(self, token: str) -> Piece:
        if token in self._silent:
            return None
        if self._byte_level:
            return byte_level(token)
        if self._byte_fallback:
            return fallback_byte(token) or token
        return token

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Return an incremental decoder for the bytes that `piece` returns. Its text is the same as that of `decode`.

        A tokenizer with byte fallback replaces each invalid byte by U+FFFD, a ByteLevel tokenizer each run of them.
        """
        errors = "replace"
        if self._byte_fallback:
            errors = REPLACES_EACH_BYTE
        return codecs.getincrementaldecoder("utf-8")(errors)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; of a special token its name; empty for an id beyond the vocabulary.

        Incomplete UTF-8 characters become U+FFFD.
        """
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        if piece is None:
            return self._tokenizer.id_to_token(token_id) or ""
        before = self.decode(self._anchor)  # in front of nothing, many decoders drop a token's leading space
        return self.decode([*self._anchor, token_id])[len(before) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes of a token, or of a special token's name; None for an id beyond the vocabulary."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece
        text = self.token_text(token_id)
        if not text and piece is None:
            return None
        return text.encode("utf-8")

    @cached_property
    def _anchor(self) -> list[int]:
        """Id of a plain word that stands in front of another token, or empty."""
        for token_id in range(self.vocab_size):
            if isinstance(self.piece(token_id), str) and self.decode([token_id]).strip().isalnum():
                return [token_id]
        return []


async def read_tokenizer(files: pb.TokenizerFiles, override: str | None, renderers: Renderers) -> Tokenizer:
    """Return the tokenizer that these files describe, with its chat template compiled by `renderers`.

    override: the operator's template, which replaces that of the files; None without one. Raises ConfigError, which
    names the file, if the files cannot be used.
    """
    tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
    configured = _config_of(files.tokenizer_config_json).get("chat_template")
    additional = files.additional_chat_templates
    template = template_of_files(files.chat_template, configured, override, additional)
    if template is not None:
        tokenizer.template = await ChatTemplate.compiled(template, tokenizer.special_tokens, renderers)
    return tokenizer


def _num_chars_read_first(text: str, num_ids: int) -> int:
    num_bytes = len(text.encode("utf-8", "replace"))
    return BYTES_PER_TOKEN * num_ids * len(text) // max(1, num_bytes)


def without_prefix_space(part: Any) -> Any:
    """Return a tokenizer.json, or a part of it, changed so that the tokenizer puts no space before a text."""
    if isinstance(part, list):
        return [without_prefix_space(step) for step in part if not _prepends(step)]
    if not isinstance(part, dict) or part.get("type") in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        return part
    changed = dict(part)
    for name in part.keys() - {"added_tokens"}:
        changed[name] = None
        if not _prepends(part[name]):
            changed[name] = without_prefix_space(part[name])
    if part.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        changed["add_prefix_space"] = False
    return changed


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def _is_control(token: tokenizers.AddedToken) -> bool:
    # As in llguidance: a special token, or one in angle brackets, is no text.
    content: str = token.content
    return bool(token.special) or (content.startswith("<") and content.endswith(">"))


def _byte_rules(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    kinds: set[str] = set()
    if decoder is not None:
        kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds and not kinds <= {"ByteLevel", "Fuse"}:
        raise ConfigError(
            f"tokenizer.json decodes with {sorted(kinds)}; ByteLevel together with others cannot be streamed"
        )
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def _config_of(data: bytes) -> dict[str, Any]:
    return parse_object(data or b"{}", TOKENIZER_CONFIG)


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACES_EACH_BYTE, _replace_each)
