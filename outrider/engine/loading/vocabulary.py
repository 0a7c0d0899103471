"""Read a model's vocabulary size, context limit and end ids without its weights.

Called by draft workers without a model of their own, such as n-gram tables, for the target for which they draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.engine.architectures.context import context_limit_of
from outrider.engine.files.ends import decoder_start_of, read_ends, read_generation
from outrider.engine.files.model_files import CONFIG, model_file
from outrider.engine.loading.loader import read_config
from outrider.wire.models.model_id import local_path

UNLIMITED_CONTEXT = 1 << 20
"""Maximum number of tokens of a request, if neither a setting nor a configuration limits it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Facts about a target's vocabulary and context, which a drafter without weights needs."""

    size: int
    """Number of logits of the target at a position. It may be larger than the number of tokens in the target's
    tokenizer."""
    context_limit: int
    """Maximum number of tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end an output of the target."""
    decoder_start_ids: tuple[int, ...] = ()
    """Token ids with which every output of an encoder-decoder model begins; empty for other models."""


def read_vocabulary(model: str, tokenizer_json: bytes, context_limit: int | None) -> Vocabulary:
    """Return the vocabulary and context limit of a folder, GGUF file or hub id.

    If a folder contains only a tokenizer, the size is its largest token id plus 1, and no id ends an output.
    tokenizer_json: content of the tokenizer's file. context_limit: the setting of this name, in tokens; None = the
    model's own limit. Raises ConfigError for a configuration that cannot be read, and for a setting above the model's
    limit.
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
