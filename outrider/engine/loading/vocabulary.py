"""Read what a draft without a model must know of the model that it drafts for, without its weights."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.engine.architectures.context import context_limit_of
from outrider.engine.files.ends import decoder_start_of, read_ends, read_generation
from outrider.engine.files.model_files import CONFIG, model_file
from outrider.engine.loading.loader import read_config
from outrider.wire.models.model_id import local_path

UNLIMITED_CONTEXT = 1 << 20
"""Tokens, used where no model says a limit: tables have none."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The facts of a model that a draft without weights needs."""

    size: int
    """Entries of the model's logits, which may be more than the tokenizer's."""
    context_limit: int
    eos_token_ids: tuple[int, ...]
    decoder_start_ids: tuple[int, ...] = ()
    """As `ModelFacts.decoder_start_ids`."""


def read_vocabulary(model: str, tokenizer_json: bytes, context_limit: int | None) -> Vocabulary:
    """Read the configuration of a folder, GGUF file or hub id; a folder without one is described by its tokenizer.

    context_limit: the setting. Raises ConfigError.
    """
    path = local_path(model)
    if path is not None and path.is_dir() and model_file(model, CONFIG) is None:
        ids = Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True).values()
        return Vocabulary(max(ids) + 1, context_limit or UNLIMITED_CONTEXT, ())
    config = read_config(model)
    text = config.get_text_config(decoder=True)
    start = decoder_start_of(config, read_generation(model, config))
    limit = context_limit_of(config, context_limit)
    return Vocabulary(text.vocab_size, limit, read_ends(model, config).ids, start)
