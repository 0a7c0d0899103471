"""`load_tokenizer` loads a tokenizer.json; other functions read the special tokens of a tokenizer_config.json. Used by
gateway and workers.

The tokenizers library panics on some wrong files. Its panics become ConfigErrors here.
"""

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
"""Names of the special tokens that any tokenizer_config.json may have, in transformers' order."""
SAMPLES = ("", "Hello hello", " \t\n  ", "0123456789")
"""Texts that are encoded when a tokenizer is loaded. A tokenizer that panics or raises on one of them is refused."""
MAX_TOKEN_ID = (1 << 20) - 1
"""Largest token id that a tokenizer may have. It limits the size of tables with one entry per id. The largest published
vocabulary, XLM-V's, has 901,629 tokens."""

MAX_QUOTED = 400
"""Maximum number of characters of an error of the tokenizers library that our error quotes. The library's text may
contain much of a file."""


def load_tokenizer(data: bytes, name: str = TOKENIZER_JSON) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, without truncation and padding.

    data: content of the file. name: file name, for errors. Raises ConfigError for a file that is not a tokenizer.json,
    and for a tokenizer that cannot encode one of `SAMPLES`.
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
    """Parse a tokenizer_config.json and return the texts of its special tokens by name, such as {"eos_token": "</s>"}.
    The model's own names, such as image_token, are included.

    config_json: content of the file; empty = there is no such file. Raises ConfigError if it is not a JSON object.
    """
    return named_tokens(parse_object(config_json or b"{}", TOKENIZER_CONFIG))


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens of a parsed tokenizer_config.json by name. The standard names come first,
    then the model's own names such as image_token, which chat templates may use too.
    """
    # {"bos_token": "<s>", "image_token": {"content": "<image>"}}: {"bos_token": "<s>", "image_token": "<image>"}
    texts = dict[str, str]()
    for name, entry in named_entries(config).items():
        texts[name] = token_text(entry) or ""
    return texts


def named_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the special tokens of a parsed tokenizer_config.json by name. An entry is a text, or an
    object with the text as `content`.
    """
    entries = dict.fromkeys(STANDARD_NAMES)
    for name, entry in config.items():
        if name in entries or name.endswith("_token"):
            entries[name] = entry
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        entries.update(extra)
    return {name: entry for name, entry in entries.items() if token_text(entry)}


def token_text(entry: Any) -> str | None:
    """Return the text of a token, given its entry in tokenizer_config.json: a text, or an object with the text as
    `content`. None = the entry is something else.
    """
    if isinstance(entry, dict):
        entry = entry.get("content")
    if not isinstance(entry, str):
        return None
    return entry


def fields_of(part: Any) -> dict[str, Any] | None:
    """Return the JSON fields of a part of a loaded tokenizer, such as its decoder. None = the tokenizer has no such
    part.

    The tokenizers library writes these fields itself, so each part has its field `type`, even where tokenizer.json
    leaves the field out.
    """
    if part is None:
        return None
    fields: dict[str, Any] = json.loads(part.__getstate__())
    return fields


def is_library_error(error: BaseException) -> bool:
    """Return whether an error came from the tokenizers library: an Exception, or a panic of its compiled code (which is
    a BaseException but not an Exception).
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_QUOTED] or type(error).__name__
