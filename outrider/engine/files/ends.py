"""Read the token ids that end a model's outputs, and the ids with which every output of an encoder-decoder model
begins.

Called by the loaders of models, heads and vocabularies, and by `outrider doctor`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from outrider.engine.files.model_files import CONFIG, GENERATION, read_model_json, unusable
from outrider.engine.files.tokenizer_files import FoundTokenizer, find_tokenizer
from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import MAX_TOKEN_ID, TOKENIZER_CONFIG, read_special_tokens

NO_END = -1
"""Value of `eos_token_id` in the configurations of checkpoints that have no end token, or name it only in another
file."""


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Token ids that end an output, according to the files of a model."""

    ids: tuple[int, ...]
    """All end ids that generation_config.json, config.json and tokenizer_config.json name. If none of them names any,
    these are the default of the model's config class."""
    difference: str | None
    """Sentence for the log that shows which file names which ids, if the files differ; None if they agree."""


def read_generation(model: str, config: PreTrainedConfig) -> GenerationConfig:
    """Return the generation settings of a folder or hub id: from generation_config.json or, if there is none, from
    config.json.

    The `eos_token_id` of the result has the ids of that file alone; `read_ends` returns the end ids of all files.
    Raises ConfigError for a value that is not a token id.
    """
    raw = read_model_json(model, GENERATION)
    file = CONFIG if raw is None else GENERATION
    try:
        if raw is None:
            generation = GenerationConfig.from_model_config(config)
        else:
            generation = GenerationConfig.from_dict(raw)
    except Exception as error:  # transformers computes with what it reads, and raises whatever comes of that
        raise unusable(model, error, file) from error
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        _parse_ids(model, name, getattr(generation, name))
    return generation


def read_ends(model: str, config: PreTrainedConfig) -> EndTokens:
    """Return the end ids that any file of a folder or hub id names. If no file names any, return the default of the
    config class.

    Fine-tunes of base models often name the end of a chat in one file alone. Raises ConfigError for a value that is not
    a token id.
    """
    tokenizer = find_tokenizer(model)
    generation = read_model_json(model, GENERATION) or {}
    ends_of_files = {
        GENERATION: _parse_ends(model, generation.get("eos_token_id")),
        CONFIG: _config_ends(model, config),
        TOKENIZER_CONFIG: _tokenizer_ends(tokenizer),
    }
    named = {file: ids for file, ids in ends_of_files.items() if ids}
    if not named:
        default = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
        return EndTokens(_parse_ends(model, default), None)
    union = _union(named.values())
    first = next(iter(named.values()))
    if set(union) == set(first):
        return EndTokens(union, None)
    texts = _describe_tokens(tokenizer, union)
    descriptions = []
    for file, ids in named.items():
        names = " and ".join(texts[end] for end in ids)
        descriptions.append(f"{file} {names}")
    return EndTokens(
        union,
        f"the files of {model} name different ends of an answer, and any of them ends one: {', '.join(descriptions)}",
    )


def _union(lists: Iterable[Iterable[int]]) -> tuple[int, ...]:
    # in the order of their first occurrence
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _config_ends(model: str, config: PreTrainedConfig) -> tuple[int, ...]:
    # What config.json itself states, for the model or its text part: `config` may have a default of its class instead.
    raw = read_model_json(model, CONFIG)
    text = config.get_text_config(decoder=True)
    if raw is None:  # GGUF, whose `config` has what the file states
        return _parse_ends(model, text.eos_token_id)
    ends = [_parse_ends(model, raw.get("eos_token_id"))]
    for name, part in raw.items():  # other names may be of a value for each layer, which transformers does not give
        if isinstance(part, dict) and getattr(config, name, None) is text:
            ends.append(_parse_ends(model, part.get("eos_token_id")))
    return _union(ends)


def _tokenizer_ends(found: FoundTokenizer | None) -> tuple[int, ...]:
    if found is None:
        return ()
    text = read_special_tokens(found.files.tokenizer_config_json).get("eos_token")
    if text is None:
        return ()
    end = found.tokenizer.token_to_id(text)
    if end is None:
        return ()
    return (end,)


def _describe_tokens(found: FoundTokenizer | None, ids: tuple[int, ...]) -> dict[int, str]:
    # {2: "</s> (2)"}; "2" alone where the tokenizer has no such token
    texts = {token_id: str(token_id) for token_id in ids}
    if found is None:
        return texts
    for token_id in ids:
        text = found.tokenizer.id_to_token(token_id)
        if text is not None:
            texts[token_id] = f"{text} ({token_id})"
    return texts


def _parse_ends(model: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        value = [end for end in value if end != NO_END]
    elif value == NO_END:
        value = None
    return _parse_ids(model, "eos_token_id", value)


def _parse_ids(model: str, name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            or_list = " or a list of them" if name == "eos_token_id" else ""
            raise ConfigError(
                f"{name} of {model} (generation_config.json, config.json) is {reprlib.repr(value)}, must be an id from "
                f"0 to {MAX_TOKEN_ID}{or_list}; correct it",
                param="model",
            )
    return tuple(ids)


def decoder_start_of(config: PreTrainedConfig, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return the token ids with which every output of an encoder-decoder model begins; empty for other models.

    The first id starts the decoder. A second follows if the generation settings force it (`forced_bos_token_id`).
    Raises ConfigError if neither `config` nor `generation` names the first id.
    """
    if not config.is_encoder_decoder:
        return ()
    for settings in (generation, config):
        start = getattr(settings, "decoder_start_token_id", None)
        if start is None:
            continue
        forced = getattr(generation, "forced_bos_token_id", None)
        if forced is None:
            return (start,)
        return (start, forced)
    raise ConfigError(
        "neither config.json nor generation_config.json names a decoder_start_token_id, with which an encoder-decoder "
        "model's answers begin; add it",
        param="model",
    )
