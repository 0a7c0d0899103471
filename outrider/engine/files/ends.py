"""Read how a model's answers end and begin: the ids that its configurations and its tokenizer name.

Called by the loader, the heads' loader, tables of a model's tokens and `outrider doctor`.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from outrider.engine.files.model_files import CONFIG, GENERATION, read_model_json, unusable
from outrider.engine.files.tokenizer_files import FoundTokenizer, find_tokenizer
from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import MAX_TOKEN_ID, TOKENIZER_CONFIG, read_special_tokens

NO_END = -1
"""An `eos_token_id` of checkpoints that have none, or name it in another file."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The ids that end an answer."""

    ids: tuple[int, ...]
    difference: str | None
    """Which file names which, where one file names an end that the generation's does not; a sentence for operators."""


def read_generation(model: str, config: PreTrainedConfig) -> GenerationConfig:
    """Read generation_config.json of a folder or hub id; without one, what config.json says of it. Raises ConfigError
    for an id that is none. Its `eos_token_id` is one file's alone: `read_ends` has all.
    """
    raw = read_model_json(model, GENERATION)
    try:
        generation = GenerationConfig.from_model_config(config) if raw is None else GenerationConfig.from_dict(raw)
    except Exception as error:  # transformers computes with what it reads, and raises whatever comes of that
        raise unusable(model, error, CONFIG if raw is None else GENERATION) from error
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        _checked_ids(model, name, getattr(generation, name))
    return generation


def read_ends(model: str, config: PreTrainedConfig) -> Ends:
    """Return every id that a file of a folder or hub id names as an end; where none does, the class's own.

    Fine-tunes of base models often have the end of a chat in one file alone. Raises ConfigError for an id that is none.
    """
    tokenizer = find_tokenizer(model)
    found = {
        GENERATION: _checked_ends(model, (read_model_json(model, GENERATION) or {}).get("eos_token_id")),
        CONFIG: _config_ends(model, config),
        TOKENIZER_CONFIG: _tokenizer_ends(tokenizer),
    }
    named = {file: ids for file, ids in found.items() if ids}
    if not named:
        own = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
        return Ends(_checked_ends(model, own), None)
    united = tuple(dict.fromkeys(end for ids in named.values() for end in ids))
    first = next(iter(named.values()))
    if set(united) == set(first):
        return Ends(united, None)
    texts = _texts_of(tokenizer, united)
    listed = []
    for file, ids in named.items():
        names = " and ".join(texts[end] for end in ids)
        listed.append(f"{file} {names}")
    return Ends(
        united,
        f"the files of {model} name different ends of an answer, and any of them ends one: {', '.join(listed)}",
    )


def _config_ends(model: str, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ends that config.json states, for the whole model or its text part: classes have one unstated. A GGUF
    file has no config.json, and what was read of it is stated.
    """
    raw = read_model_json(model, CONFIG)
    text = config.get_text_config(decoder=True)
    if raw is None:
        return _checked_ends(model, text.eos_token_id)
    parts = [raw]
    for name, part in raw.items():  # other names may be of a value for each layer, which transformers does not give
        if isinstance(part, dict) and getattr(config, name, None) is text:
            parts.append(part)
    ends = dict.fromkeys(end for part in parts for end in _checked_ends(model, part.get("eos_token_id")))
    return tuple(ends)


def _tokenizer_ends(found: FoundTokenizer | None) -> tuple[int, ...]:
    if found is None:
        return ()
    text = read_special_tokens(found.files.tokenizer_config_json).get("eos_token")
    end = None if text is None else found.tokenizer.token_to_id(text)
    return () if end is None else (end,)


def _texts_of(found: FoundTokenizer | None, ids: tuple[int, ...]) -> dict[int, str]:
    """Return each id with its token's text in front, where the tokenizer has one."""
    texts = {}
    for token_id in ids:
        text = None if found is None else found.tokenizer.id_to_token(token_id)
        texts[token_id] = str(token_id) if text is None else f"{text} ({token_id})"
    return texts


def _checked_ends(model: str, value: Any) -> tuple[int, ...]:
    """Return the ends of a value of a configuration. Raises ConfigError."""
    if isinstance(value, list):
        value = [end for end in value if end != NO_END]
    elif value == NO_END:
        value = None
    return _checked_ids(model, "eos_token_id", value)


def _checked_ids(model: str, name: str, value: Any) -> tuple[int, ...]:
    """Return the ids of a value of a configuration. Raises ConfigError."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise ConfigError(
                f"{name} of {model} (generation_config.json, config.json) is {reprlib.repr(value)}, must be an id from "
                f"0 to {MAX_TOKEN_ID}{' or a list of them' if name == 'eos_token_id' else ''}; correct it",
                param="model",
            )
    return tuple(ids)


def decoder_start_of(config: PreTrainedConfig, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return what every answer of an encoder-decoder model begins with: the start, and what generation then forces.

    Empty for other models. Raises ConfigError where nothing names it.
    """
    if not config.is_encoder_decoder:
        return ()
    for names in (generation, config):
        start = getattr(names, "decoder_start_token_id", None)
        if start is not None:
            forced = getattr(generation, "forced_bos_token_id", None)
            return (start,) if forced is None else (start, forced)
    raise ConfigError(
        "neither config.json nor generation_config.json names a decoder_start_token_id, with which an encoder-decoder "
        "model's answers begin; add it",
        param="model",
    )
