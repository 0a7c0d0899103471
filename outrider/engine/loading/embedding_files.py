"""Read look-ahead embeddings and append them to a target's embedding table. Called by the loader.

They are the method of PaSS (Monea et al., 2023, 2311.13581): the model is fed ids beyond its vocabulary, each of which
stands for a token that is still to come. `outrider train-head pass` trains the embeddings of these ids.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.files.model_files import first_line, model_file
from outrider.wire.errors import ConfigError
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

NAME = "embeddings"
"""Name of the tensor with the look-ahead embeddings in their file, which has no other tensor."""
FILE = "model.safetensors"
"""Name of the file with the look-ahead embeddings, if the setting lookahead_embeddings names a folder."""


def read_embeddings(source: str, width: int) -> Tensor:
    """Return the look-ahead embeddings of a file, one in a row of `width` numbers, in the file's dtype.

    source: the setting lookahead_embeddings: the file, or the folder that contains it under the name FILE. width:
    hidden size of the target. Raises ConfigError for a file that cannot be read or contains anything else, and for
    numbers that are not finite.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = model_file(str(path), FILE) or path / FILE
    shown = f"lookahead_embeddings is {source!r}"
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != {NAME}:
                raise ConfigError(
                    f"{shown}, which holds the tensors {', '.join(sorted(names)) or 'none'}, must hold {NAME} alone, "
                    "as outrider train-head pass writes it",
                    param="lookahead_embeddings",
                )
            embeddings: Tensor = file.get_tensor(NAME)  # [L, width]
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{shown}, and {path} cannot be read: {first_line(error)}; name a file that outrider train-head pass "
            "wrote, or its folder",
            param="lookahead_embeddings",
        ) from error
    if embeddings.dim() != 2 or embeddings.shape[1] != width or not 1 <= len(embeddings) <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"{shown}, whose {NAME} are {list(embeddings.shape)}, must be [1 to {MAX_DRAFT_TOKENS}, {width}] for this "
            "target; train them for it",
            param="lookahead_embeddings",
        )
    if not embeddings.isfinite().all():
        raise ConfigError(f"{shown}, which holds numbers that are not finite", param="lookahead_embeddings")
    return embeddings


def append_embeddings(network: PreTrainedModel, source: str) -> int:
    """Append look-ahead embeddings to the model's embedding table, in place. Return their number.

    source: the setting lookahead_embeddings, a file or a folder. The output projection is not changed: if it was the
    same tensor as the embedding table, it now takes memory of its own. Raises ConfigError for a file that cannot be
    read or contains anything else, and for a model without one embedding table.
    """
    embedding = network.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or network.config.is_encoder_decoder:  # whose tables may be several
        raise ConfigError(
            f"lookahead_embeddings is {source!r}, and {type(network).__name__} has no table that rows can be appended "
            "to; leave it out",
            param="lookahead_embeddings",
        )
    embeddings = read_embeddings(source, embedding.embedding_dim)
    weight = embedding.weight.detach()  # [V, width]
    embedding.weight = nn.Parameter(torch.cat([weight, embeddings.to(weight)]), requires_grad=False)  # [V + L, width]
    embedding.num_embeddings = len(embedding.weight)
    return len(embeddings)
