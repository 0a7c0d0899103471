"""Change classes that compute positions from token ids, so that every token has a position. Called by the loader.

RoBERTa and its like count positions from the padding's id on and give none to tokens of that id:

    padding_idx 1, ids [7, 1, 9]: transformers has [2, 1, 3], Outrider [2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.wire.errors import ConfigError

NUMBERING = "create_position_ids_from_input_ids"
"""Name of the method that computes positions [B, T] in modules like RoBERTa's, from ids [B, T], the id of the padding
and the number of tokens before."""


def number_every_token(network: PreTrainedModel) -> None:
    """Make the decoder give every token a position, even a token with the padding's id, in place. Logits then do not
    depend on how a text is divided into steps.
    """
    for module in _numbering_modules(network):
        setattr(module, NUMBERING, _consecutive_positions)


def limit_to_position_tables(network: PreTrainedModel, limit: int, setting: int | None) -> int:
    """Return the context limit, lowered to the number of tokens for which the model's position tables have rows.

    Rows up to the index of the padding's id are not used for tokens. limit: the context limit so far, in tokens.
    setting: the setting `context_limit`; None = not set. Raises ConfigError if the setting is larger than the number of
    rows for tokens.
    """
    for module in _numbering_modules(network):
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding):
            max_tokens = table.num_embeddings - module.padding_idx - 1
            if setting is not None and setting > max_tokens:
                raise ConfigError(
                    f"context_limit is {setting}, the model was made for {max_tokens}: its {table.num_embeddings} "
                    f"positions begin behind the padding's, {module.padding_idx}",
                    param="context_limit",
                )
            limit = min(limit, max_tokens)
    return limit


def _numbering_modules(network: PreTrainedModel) -> Iterator[nn.Module]:
    decoder: nn.Module = network
    if network.config.is_encoder_decoder:
        decoder = network.get_decoder()
    for module in decoder.modules():
        if hasattr(module, NUMBERING) and isinstance(getattr(module, "padding_idx", None), int):
            yield module


def _consecutive_positions(input_ids: Tensor, padding_idx: int, past_key_values_length: int = 0) -> Tensor:
    # [B, T] int64
    first = padding_idx + 1 + past_key_values_length
    return torch.arange(first, first + input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
