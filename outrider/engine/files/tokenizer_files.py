"""Read the tokenizer of a folder, GGUF file or hub id, and complete its tokenizer.json.

Afterwards tokenizer.json has every token that any of the files lists, as in transformers: the gateway and the
comparison of tokenizers read no other file. Called by the workers, `outrider doctor` and `outrider alpha`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from outrider.engine.files.added_tokens import add_tokens, parse_added_tokens_decoder, read_added_tokens
from outrider.engine.files.gguf_tokenizer import gguf_tokenizer_files
from outrider.engine.files.model_files import (
    TOKENIZER_SOURCES,
    first_line,
    gguf_path,
    model_file,
    read_file,
    read_optional,
)
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import ADDITIONAL_TEMPLATES, local_path
from outrider.wire.models.model_json import parse_object
from outrider.wire.models.tokenizer_json import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    is_library_error,
    load_tokenizer,
)
from outrider.wire.peer_text import bound_text

TEMPLATE = "chat_template.jinja"
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Names of files in which a model that reads images may have its chat template, if none of the tokenizer's files has
it."""
SPECIAL_TOKENS = "special_tokens_map.json"
SAMPLE = "hello"
"""Text that every correctly converted tokenizer can encode and decode."""
TEXT_SUFFIXES = (".json", ".txt", ".model")
"""Suffixes of the files that transformers may read to convert a tokenizer."""
MAX_SHOWN = 3
"""Maximum number of tokens that the sentence from `tokens_beyond` names."""


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """Tokenizer of a model: its files, and the tokenizer object that was made from them."""

    files: pb.TokenizerFiles
    tokenizer: Tokenizer


_cache: ContextVar[dict[str, FoundTokenizer | None] | None] = ContextVar("found_tokenizers", default=None)
"""Tokenizers found so far, by model, within `tokenizers_read_once`; None outside of it."""


def tokenizer_files(model: str) -> pb.TokenizerFiles:
    """Return the files of a model's tokenizer; an optional file that is missing is empty. Raises ConfigError if there
    is no tokenizer, or if its files are damaged, contradict each other or cannot be converted.
    """
    return read_tokenizer(model).files


def read_tokenizer(model: str) -> FoundTokenizer:
    """Return the tokenizer of a folder, GGUF file or hub id.

    Raises ConfigError if there is none, or if its files are damaged, contradict each other or cannot be converted.
    """
    found = find_tokenizer(model)
    if found is None:
        raise ConfigError(
            f"{model} has no {TOKENIZER_JSON} (the tokenizer as the tokenizers library writes it)", param="model"
        )
    return found


def find_tokenizer(model: str) -> FoundTokenizer | None:
    """Return the tokenizer of a folder, GGUF file or hub id; None if it has none. Raises ConfigError if its files
    are damaged, contradict each other or cannot be converted.
    """
    cache = _cache.get()
    if cache is None:
        return _find(model)
    if model not in cache:
        cache[model] = _find(model)
    return cache[model]


@contextlib.contextmanager
def tokenizers_read_once() -> Iterator[None]:
    """Context manager within which each model's tokenizer is read once and kept: one of 262,144 tokens takes 2 s."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def _find(model: str) -> FoundTokenizer | None:
    gguf = gguf_path(model)
    if gguf is not None:
        files = gguf_tokenizer_files(gguf)
        return FoundTokenizer(files, load_tokenizer(files.tokenizer_json, str(gguf)))
    path = model_file(model, TOKENIZER_JSON)
    if path is None:
        data = _convert(model)
    else:
        data = read_file(path)
    if data is None:
        return None
    tokenizer = load_tokenizer(data, str(path or TOKENIZER_JSON))
    config_data = read_optional(model, TOKENIZER_CONFIG)
    config = parse_object(config_data or b"{}", f"{TOKENIZER_CONFIG} of {model}")
    listed = parse_added_tokens_decoder(model, config)
    if listed is None:  # folders of older versions
        special_data = read_optional(model, SPECIAL_TOKENS)
        if special_data:
            config |= parse_object(special_data, f"{SPECIAL_TOKENS} of {model}")
            config_data = json.dumps(config).encode()
        listed = read_added_tokens(model, config, tokenizer)
    if add_tokens(model, tokenizer, listed, config):
        data = tokenizer.to_str().encode()
    template = read_optional(model, TEMPLATE)
    if not template and config.get("chat_template") is None:
        processor_template = _read_processor_template(model)
        if processor_template is not None:
            config_data = json.dumps({**config, "chat_template": processor_template}).encode()
    files = pb.TokenizerFiles(
        tokenizer_json=data,
        tokenizer_config_json=config_data,
        chat_template=template,
        additional_chat_templates=_read_additional_templates(model),
    )
    return FoundTokenizer(files, tokenizer)


def _read_processor_template(model: str) -> Any:
    for name in PROCESSOR_FILES:
        template = parse_object(read_optional(model, name) or b"{}", f"{name} of {model}").get("chat_template")
        if template is not None:
            return template
    return None


def _read_additional_templates(model: str) -> dict[str, bytes]:
    templates = {}
    for name, file in ADDITIONAL_TEMPLATES.items():
        template = read_optional(model, file)
        if template:
            templates[name] = template
    return templates


def _convert(model: str) -> bytes | None:
    # the tokenizer.json that transformers makes of another form of the tokenizer; None where there is no other form
    paths = []
    for name in TOKENIZER_SOURCES:
        source = model_file(model, name)
        if source is not None:
            paths.append(source)
    if not paths:
        return None
    for path in paths:
        read_file(path)  # raises for one that is too large
    _check_links(model)
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
        decoded = converted.decode(converted.encode(SAMPLE, add_special_tokens=False).ids)
        if SAMPLE not in decoded.casefold():  # a class that does not find its file makes an empty tokenizer
            raise ValueError(f"it writes {SAMPLE!r} as {decoded!r}")
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


def _check_links(model: str) -> None:
    # transformers' classes open files by names of their own: none of them may be a link that leads out of the folder
    folder = local_path(model)
    if folder is None:  # the hub's cache holds what was fetched
        return
    for path in folder.iterdir():
        if path.suffix in TEXT_SUFFIXES:
            model_file(model, path.name)


def tokens_beyond(tokenizer: Tokenizer, num_rows: int) -> str | None:
    """Return a sentence for the log that names tokens whose ids are too large for the model; None if there are none.

    num_rows: number of rows of the model's embedding table.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((token_id, text) for text, token_id in vocabulary.items() if token_id >= num_rows)
    if not beyond:
        return None
    shown = ", ".join(f"{bound_text(text)!r} ({token_id})" for token_id, text in beyond[:MAX_SHOWN])
    more = ""
    if len(beyond) > MAX_SHOWN:
        more = f" and {len(beyond) - MAX_SHOWN} more"
    return (
        f"the tokenizer has tokens beyond the model's {num_rows} rows: {shown}{more}; a request that needs one is "
        "refused"
    )
