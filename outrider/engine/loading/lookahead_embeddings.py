"""Look-ahead embeddings (PaSS: Monea et al., 2023, 2311.13581): rows behind a target's embedding table, each of an id
that stands for a token still to come. `outrider train-head pass` makes them.
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
"""Of the one tensor in the file."""
FILE = "model.safetensors"
"""In a folder."""


def read_embeddings(source: str, width: int) -> Tensor:
    """Return the embeddings [L, width] of a file, or of the one in a folder. Raises ConfigError."""
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
            found: Tensor = file.get_tensor(NAME)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{shown}, and {path} cannot be read: {first_line(error)}; name a file that outrider train-head pass "
            "wrote, or its folder",
            param="lookahead_embeddings",
        ) from error
    if found.dim() != 2 or found.shape[1] != width or not 1 <= len(found) <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"{shown}, whose {NAME} are {list(found.shape)}, must be [1 to {MAX_DRAFT_TOKENS}, {width}] for this "
            "target; train them for it",
            param="lookahead_embeddings",
        )
    if not found.isfinite().all():
        raise ConfigError(f"{shown}, which holds numbers that are not finite", param="lookahead_embeddings")
    return found


def append_embeddings(network: PreTrainedModel, source: str) -> int:
    """Make a file's embeddings the last rows of the model's; return how many there are. Its output projection stays as
    it is, also where both were one: such a model then holds its table twice. Raises ConfigError.
    """
    embedding = network.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or network.config.is_encoder_decoder:  # whose tables may be several
        raise ConfigError(
            f"lookahead_embeddings is {source!r}, and {type(network).__name__} has no table that rows can be appended "
            "to; leave it out",
            param="lookahead_embeddings",
        )
    embeddings = read_embeddings(source, embedding.embedding_dim)
    weight = embedding.weight.detach()
    embedding.weight = nn.Parameter(torch.cat([weight, embeddings.to(weight)]), requires_grad=False)
    embedding.num_embeddings = len(embedding.weight)
    return len(embeddings)
