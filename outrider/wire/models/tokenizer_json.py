"""Read a tokenizer.json with the tokenizers library, which panics where others raise. Used by gateway and workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from outrider.wire.errors import ConfigError
from outrider.wire.models.model_json import parse_object

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may name, in transformers' order."""
SAMPLES = ("", "Hello hello", " \t\n  ", "0123456789")
"""Texts that are encoded at load: what panics on one, or has no unknown token where it needs one, is refused then."""
MAX_TOKEN_ID = (1 << 20) - 1
"""Tables have a row for each id up to the largest. The largest published vocabulary has 901,629, XLM-V's."""

MAX_QUOTED = 400
"""Characters of the library's error in ours: it may quote as much of a file as it likes."""


def load_tokenizer(data: bytes, name: str = TOKENIZER_JSON) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes text as it is, never cut nor padded. name: of the file, in an error.

    Raises ConfigError for a file that is none, and for a tokenizer that cannot encode one of `SAMPLES`.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for special in (True, False):
            tokenizer.encode_batch_fast(list(SAMPLES), add_special_tokens=special)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise ConfigError(
            f"{name} cannot be used: {_one_line(error)}; take it from the model's folder, or save it again with "
            "PreTrainedTokenizerFast.save_pretrained",
            param="model",
        ) from None
    if largest > MAX_TOKEN_ID:
        raise ConfigError(f"{name} has a token of id {largest}, and ids go up to {MAX_TOKEN_ID}", param="model")
    return tokenizer


def read_special_tokens(config_json: bytes) -> dict[str, str]:
    """Return `named_tokens` of the bytes of a tokenizer_config.json, which may be empty. Raises ConfigError."""
    return named_tokens(parse_object(config_json or b"{}", TOKENIZER_CONFIG))


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer_config.json names, by name: the standard ones first, then
    names of the model's own, which chat templates may use like those.
    """
    return {name: token_text(entry) or "" for name, entry in named_entries(config).items()}


def named_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same as tokenizer_config.json spells them."""
    extra = config.get("extra_special_tokens")
    own = {name: entry for name, entry in config.items() if name.endswith("_token")}
    entries = {name: config.get(name) for name in STANDARD_NAMES} | own | (extra if isinstance(extra, dict) else {})
    return {name: entry for name, entry in entries.items() if token_text(entry)}


def token_text(entry: Any) -> str | None:
    """Return the text of a special token as tokenizer_config.json spells it: a text, or an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def described(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as the library writes it, None for no part. In a file, types may be left out, and
    other keys may stand.
    """
    if part is None:
        return None
    fields: dict[str, Any] = json.loads(part.__getstate__())
    return fields


def is_library_error(error: BaseException) -> bool:
    """Return whether the tokenizers library raised it: plain Exceptions, and panics, which are no Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_QUOTED] or type(error).__name__
