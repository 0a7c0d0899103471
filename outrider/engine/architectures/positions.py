"""Classes that number their tokens by their ids: RoBERTa and its like begin behind the number of the padding, and pass
over tokens that are padding. A text is served as it is: each of its tokens has a position, whatever its id.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.wire.errors import ConfigError

NUMBERING = "create_position_ids_from_input_ids"
"""Method of their modules: takes ids [B, T], the padding's id and the number of tokens before; returns positions."""


def number_every_token(network: PreTrainedModel) -> None:
    """Have the decoder's modules that number tokens pass over none, so that a text's logits do not depend on how it is
    cut into forwards."""
    for module in _numbering(network):
        setattr(module, NUMBERING, _consecutive)


def within_tables(network: PreTrainedModel, limit: int, wanted: int | None) -> int:
    """Return the context limit, cut to the tables of positions, whose first rows no token has.

    wanted: the setting. Raises ConfigError where that does not fit.
    """
    for module in _numbering(network):
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding):
            num_places = table.num_embeddings - module.padding_idx - 1
            if wanted is not None and wanted > num_places:
                raise ConfigError(
                    f"context_limit is {wanted}, the model was made for {num_places}: its {table.num_embeddings} "
                    f"positions begin behind the padding's, {module.padding_idx}",
                    param="context_limit",
                )
            limit = min(limit, num_places)
    return limit


def _numbering(network: PreTrainedModel) -> Iterator[nn.Module]:
    decoder = network.get_decoder() if network.config.is_encoder_decoder else network
    for module in decoder.modules():
        if hasattr(module, NUMBERING) and isinstance(getattr(module, "padding_idx", None), int):
            yield module


def _consecutive(input_ids: Tensor, padding_idx: int, past_key_values_length: int = 0) -> Tensor:
    first = padding_idx + 1 + past_key_values_length
    return torch.arange(first, first + input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
