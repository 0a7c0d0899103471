"""Read the tokens that a model's other files list in addition to tokenizer.json, and add them to its tokenizer.

Used by `tokenizer_files`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.engine.files.model_files import read_optional
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_json import parse_object
from outrider.wire.models.tokenizer_json import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    is_library_error,
    named_entries,
    token_text,
)
from outrider.wire.peer_text import bound_text

ADDED_TOKENS = "added_tokens.json"
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
"""Boolean fields of an added token in tokenizer_config.json. `AddedToken` has fields of the same names."""
ID = re.compile(r"[0-9]{1,9}")
"""Pattern of a token id that is written as the key of a JSON object."""


def parse_added_tokens_decoder(model: str, config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    """Return the added tokens by id that tokenizer_config.json lists under `added_tokens_decoder`; None if it has no
    such list.

    model: folder or hub id, for errors. config: content of tokenizer_config.json. Raises ConfigError for an entry that
    is not a token.
    """
    entries = config.get("added_tokens_decoder")
    if entries is None:
        return None
    if not isinstance(entries, dict):
        raise _wrong(model, TOKENIZER_CONFIG, "added_tokens_decoder", entries)
    listed = {}
    for key, entry in entries.items():
        text = None
        if isinstance(entry, dict):
            text = entry.get("content")
        if not ID.fullmatch(key) or not isinstance(text, str):
            raise _wrong(model, TOKENIZER_CONFIG, f"added_tokens_decoder[{key!r}]", entry)
        listed[int(key)] = _create_token(text, entry)
    return listed


def read_added_tokens(model: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """Return the added tokens by id that added_tokens.json lists, without those that the tokenizer already has. This
    file is read if tokenizer_config.json has no `added_tokens_decoder`.

    config: content of tokenizer_config.json, which names the special tokens. Raises ConfigError for an entry that is
    not a token.
    """
    entries = parse_object(read_optional(model, ADDED_TOKENS) or b"{}", f"{ADDED_TOKENS} of {model}")
    special = _texts(_special_tokens(config))
    known = _texts(tokenizer.get_added_tokens_decoder().values())
    listed = {}
    for text, token_id in entries.items():
        if type(token_id) is not int or token_id < 0:
            raise _wrong(model, ADDED_TOKENS, repr(text), token_id)
        if text not in known:
            listed[token_id] = _create_token(text, {"special": text in special})
    return listed


def add_tokens(model: str, tokenizer: Tokenizer, listed: Mapping[int, AddedToken], config: Mapping[str, Any]) -> bool:
    """Complete the tokenizer, in place: add the tokens in `listed`, and the special tokens in `config`, that it does
    not have, and set the flags in `listed` on the tokens that it has. Return whether anything changed.

    listed: added tokens by id. config: content of tokenizer_config.json. Raises ConfigError for a token that cannot get
    its id in `listed`.
    """
    before = _describe_added_tokens(tokenizer)
    new = {}
    for token_id, token in sorted(listed.items()):
        if tokenizer.token_to_id(token.content) is None:
            new[token_id] = token
    special = {token.content: token for token in _special_tokens(config)}
    known = _texts(tokenizer.get_added_tokens_decoder().values()) | _texts(listed.values())
    tokens = []
    for _, token in sorted(listed.items()):
        token.special = token.special or token.content in special
        tokens.append(token)
    for text, token in special.items():
        if text not in known:
            tokens.append(token)
    try:
        tokenizer.add_tokens(tokens)
    except BaseException as error:
        if not is_library_error(error):
            raise
        why = bound_text(" ".join(str(error).split()))
        raise ConfigError(f"the tokens that the files of {model} add cannot be used: {why}", param="model") from None
    for token_id, token in new.items():
        given = tokenizer.token_to_id(token.content)
        if given != token_id:
            raise ConfigError(
                f"the files of {model} list the token {bound_text(token.content)!r} as {token_id}, and behind its "
                f"{TOKENIZER_JSON} it would be {given}; save the tokenizer again with every token in {TOKENIZER_JSON}",
                param="model",
            )
    return before != _describe_added_tokens(tokenizer)


def _describe_added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def _texts(tokens: Iterable[AddedToken]) -> set[str]:
    return {token.content for token in tokens}


def _special_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the special tokens that tokenizer_config.json names, in transformers' order."""
    for entry in named_entries(config).values():
        yield _create_special_token(entry)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if not isinstance(extra, list):
        return
    for entry in extra:
        if token_text(entry):
            yield _create_special_token(entry)


def _create_special_token(entry: Any) -> AddedToken:
    flags = {"special": True}
    if isinstance(entry, dict):
        flags = {**entry, "special": True}
    return _create_token(token_text(entry) or "", flags)


def _create_token(text: str, entry: Mapping[str, Any]) -> AddedToken:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        raise ConfigError(
            f"the tokenizer's files list {reprlib.repr(text)}, which is no text in UTF-8; save the tokenizer again",
            param="model",
        ) from None
    flags = {}
    for name in FLAGS:
        if isinstance(entry.get(name), bool):
            flags[name] = entry[name]
    return AddedToken(text, **flags)


def _wrong(model: str, file: str, name: str, value: object) -> ConfigError:
    shown = bound_text(f"{name} is {value!r}")
    return ConfigError(f"{file} of {model} lists no token where {shown}; save the tokenizer again", param="model")
