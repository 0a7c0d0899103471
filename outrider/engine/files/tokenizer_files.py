"""Read the tokenizer of a model folder or hub id and hand it on whole: every token that its files list is in one
tokenizer.json, as transformers would have it. The gateway and whoever compares tokenizers read nothing else.

Called by the workers, `outrider doctor` and `outrider alpha`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from outrider.engine.files.gguf_tokenizer import gguf_tokenizer_files
from outrider.engine.files.model_files import TOKENIZER_SOURCES, first_line, gguf_path, model_file, read_file
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import ADDITIONAL_TEMPLATES, local_path
from outrider.wire.models.model_json import parse_object
from outrider.wire.models.tokenizer_json import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    is_library_error,
    load_tokenizer,
    named_entries,
    token_text,
)
from outrider.wire.peer_text import bound_text

TEMPLATE = "chat_template.jinja"
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Where folders of models that read images keep the template, if not with the tokenizer."""
ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS = "special_tokens_map.json"
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
"""Fields of a listed token besides its text."""
ID = re.compile(r"[0-9]{1,9}")
"""A token's id as a key of JSON."""
SAMPLE = "hello"
"""A text that any converted tokenizer gives back."""
TEXT_SUFFIXES = (".json", ".txt", ".model")
"""Of the files that transformers makes a tokenizer of."""
MAX_SHOWN = 3
"""Tokens that a sentence names."""


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """A model's tokenizer, as files and as the library has it."""

    files: pb.TokenizerFiles
    tokenizer: Tokenizer


_found: ContextVar[dict[str, FoundTokenizer | None] | None] = ContextVar("found_tokenizers", default=None)
"""By model, what was read in the context of `tokenizers_read_once`; None outside of it."""


def tokenizer_files(model: str) -> pb.TokenizerFiles:
    """Read the files of `read_tokenizer`; optional ones are empty when missing. Raises ConfigError."""
    return read_tokenizer(model).files


def read_tokenizer(model: str) -> FoundTokenizer:
    """Read the tokenizer of a folder or hub id. Raises ConfigError when there is none, or none that encodes text."""
    found = find_tokenizer(model)
    if found is None:
        raise ConfigError(
            f"{model} has no {TOKENIZER_JSON} (the tokenizer as the tokenizers library writes it)", param="model"
        )
    return found


def find_tokenizer(model: str) -> FoundTokenizer | None:
    """Return what `read_tokenizer` does, None where there is no file of a tokenizer."""
    found = _found.get()
    if found is None:
        return _find(model)
    if model not in found:
        found[model] = _find(model)
    return found[model]


@contextlib.contextmanager
def tokenizers_read_once() -> Iterator[None]:
    """Read each tokenizer once in this context: several parts of a load need it, and 262,144 tokens take 2 s."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def _find(model: str) -> FoundTokenizer | None:
    gguf = gguf_path(model)
    if gguf is not None:
        files = gguf_tokenizer_files(gguf)
        return FoundTokenizer(files, load_tokenizer(files.tokenizer_json, str(gguf)))
    path = model_file(model, TOKENIZER_JSON)
    data = _converted(model) if path is None else read_file(path)
    if data is None:
        return None
    tokenizer = load_tokenizer(data, TOKENIZER_JSON if path is None else str(path))
    config_data = _optional(model, TOKENIZER_CONFIG)
    config = parse_object(config_data or b"{}", f"{TOKENIZER_CONFIG} of {model}")
    listed = _listed_by_config(model, config)
    if listed is None:  # folders of older versions
        special_data = _optional(model, SPECIAL_TOKENS)
        if special_data:
            config |= parse_object(special_data, f"{SPECIAL_TOKENS} of {model}")
            config_data = json.dumps(config).encode()
        listed = _listed_beside(model, config, tokenizer)
    if _complete(model, tokenizer, listed, config):
        data = tokenizer.to_str().encode()
    template = _optional(model, TEMPLATE)
    if not template and config.get("chat_template") is None:
        of_processor = _processor_template(model)
        if of_processor is not None:
            config_data = json.dumps({**config, "chat_template": of_processor}).encode()
    named = {name: _optional(model, file) for name, file in ADDITIONAL_TEMPLATES.items()}
    files = pb.TokenizerFiles(
        tokenizer_json=data,
        tokenizer_config_json=config_data,
        chat_template=template,
        additional_chat_templates={name: template for name, template in named.items() if template},
    )
    return FoundTokenizer(files, tokenizer)


def _processor_template(model: str) -> Any:
    """Return the chat template that the files of a processor hold, None where there is none. Raises ConfigError."""
    for name in PROCESSOR_FILES:
        template = parse_object(_optional(model, name) or b"{}", f"{name} of {model}").get("chat_template")
        if template is not None:
            return template
    return None


def _optional(model: str, name: str) -> bytes:
    path = model_file(model, name)
    return b"" if path is None else read_file(path)


def _complete(model: str, tokenizer: Tokenizer, listed: Mapping[int, AddedToken], config: Mapping[str, Any]) -> bool:
    """Add the tokens that the tokenizer lacks, and give the others the flags that they are listed with. Return whether
    anything changed. Raises ConfigError, naming the token, for one that is listed with an id that it cannot have.
    """
    before = {token_id: repr(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    new = {i: token for i, token in sorted(listed.items()) if tokenizer.token_to_id(token.content) is None}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in listed.values()}
    named = {token.content: token for token in _named(config)}
    for token in listed.values():
        token.special = token.special or token.content in named
    tokens = [token for _, token in sorted(listed.items())]
    tokens += [token for text, token in named.items() if text not in known]
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
    return before != {token_id: repr(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def _listed_by_config(model: str, config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    """Return the tokens by id that tokenizer_config.json lists, None where it has no list. Raises ConfigError."""
    entries = config.get("added_tokens_decoder")
    if entries is None:
        return None
    if not isinstance(entries, dict):
        raise _wrong(model, TOKENIZER_CONFIG, "added_tokens_decoder", entries)
    listed = {}
    for key, entry in entries.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not ID.fullmatch(key) or not isinstance(text, str):
            raise _wrong(model, TOKENIZER_CONFIG, f"added_tokens_decoder[{key!r}]", entry)
        listed[int(key)] = _token(text, entry)
    return listed


def _listed_beside(model: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """Return the tokens by id of added_tokens.json but for those that the tokenizer has. Raises ConfigError."""
    entries = parse_object(_optional(model, ADDED_TOKENS) or b"{}", f"{ADDED_TOKENS} of {model}")
    special = {token.content for token in _named(config)}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = {}
    for text, token_id in entries.items():
        if type(token_id) is not int or token_id < 0:
            raise _wrong(model, ADDED_TOKENS, repr(text), token_id)
        if text not in known:
            listed[token_id] = _token(text, {"special": text in special})
    return listed


def _named(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the special tokens that tokenizer_config.json names, in transformers' order."""
    for entry in named_entries(config).values():
        yield _special(entry)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for entry in extra if isinstance(extra, list) else ():
        if token_text(entry):
            yield _special(entry)


def _special(entry: Any) -> AddedToken:
    flags = entry if isinstance(entry, dict) else {}
    return _token(token_text(entry) or "", {**flags, "special": True})


def _token(text: str, entry: Mapping[str, Any]) -> AddedToken:
    """Raises ConfigError for half of a character, which JSON may have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the tokenizer's files list {reprlib.repr(text)}, which is no text in UTF-8; save the tokenizer again",
            param="model",
        ) from None
    return AddedToken(text, **{name: entry[name] for name in FLAGS if isinstance(entry.get(name), bool)})


def _wrong(model: str, file: str, name: str, value: object) -> ConfigError:
    shown = bound_text(f"{name} is {value!r}")
    return ConfigError(f"{file} of {model} lists no token where {shown}; save the tokenizer again", param="model")


def _converted(model: str) -> bytes | None:
    """Return the tokenizer.json that transformers makes of another form of a tokenizer, None where there is no other.

    Raises ConfigError.
    """
    paths = [path for name in TOKENIZER_SOURCES if (path := model_file(model, name)) is not None]
    if not paths:
        return None
    for path in paths:
        read_file(path)  # which is of a bounded size
    _check_beside(model)
    what = f"{model} has {paths[0].name} and no {TOKENIZER_JSON}"
    if paths[0].suffix == ".model" and importlib.util.find_spec("sentencepiece") is None:
        raise ConfigError(
            f"{what}; transformers converts it where sentencepiece is installed: pip install sentencepiece",
            param="model",
        )
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # what fails is one line below
    try:
        converted = AutoTokenizer.from_pretrained(model, trust_remote_code=False).backend_tokenizer
        written = converted.decode(converted.encode(SAMPLE, add_special_tokens=False).ids)
        if SAMPLE not in written.casefold():  # a class that does not find its file makes an empty one
            raise ValueError(f"it writes {SAMPLE!r} as {written!r}")
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise ConfigError(
            f"{what}, and transformers cannot convert it ({first_line(error)}); save the tokenizer where it can be "
            "read, with AutoTokenizer.from_pretrained and save_pretrained",
            param="model",
        ) from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    return str(converted.to_str()).encode()


def _check_beside(model: str) -> None:
    """Raise ConfigError for links of a folder's files of text that lead out of it: transformers opens what its classes
    name.
    """
    folder = local_path(model)
    for path in () if folder is None else folder.iterdir():  # a hub's cache holds what was fetched
        if path.suffix in TEXT_SUFFIXES:
            model_file(model, path.name)


def tokens_beyond(tokenizer: Tokenizer, num_rows: int) -> str | None:
    """Return a sentence on the tokens that a model of `num_rows` rows cannot read, None where it reads all."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((token_id, text) for text, token_id in vocabulary.items() if token_id >= num_rows)
    if not beyond:
        return None
    shown = ", ".join(f"{bound_text(text)!r} ({token_id})" for token_id, text in beyond[:MAX_SHOWN])
    more = f" and {len(beyond) - MAX_SHOWN} more" if len(beyond) > MAX_SHOWN else ""
    return (
        f"the tokenizer has tokens beyond the model's {num_rows} rows: {shown}{more}; a request that needs one is "
        "refused"
    )
