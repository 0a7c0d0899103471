"""Heads that join a token's embedding and a feature in one projection and run decoder layers over it: EAGLE-1 and 2
(2401.15077, 2406.16858), and the MTP heads of DeepSeek-V3 (2412.19437), GLM and their like.

The layers are transformers' own, of the configuration's class, so that latent attention and experts need nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from outrider.engine.heads.carry_head import CarryHead
from outrider.engine.heads.head_network import Misreading, Shape, swapped


@dataclass(frozen=True, slots=True)
class JoinedConfig:
    """Facts of a head, whatever layout its files have."""

    layers: PreTrainedConfig
    """Of the decoder layers: so many, of that class, of the head's width and the target's vocabulary."""
    joins_normed: bool
    """Whether embedding and feature are normed before they are joined, and the output before the lm_head (MTP)."""
    carries_normed: bool = False
    """Whether a carry is the output after the final norm."""
    join_bias: bool = False
    """Whether the projection of both has a bias (EAGLE-1)."""

    @property
    def width(self) -> int:
        """d, of the target's hidden states, the features and the carries."""
        width: int = self.layers.hidden_size
        return width

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        vocab_size: int = self.layers.vocab_size
        return vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the lm_head: all ids have one."""
        return self.vocab_size


class JoinedHead(CarryHead):
    """y = layers(eh_proj(cat[enorm(embedding), hnorm(feature)])), and lm_head(norm(y)).

    In EAGLE-1 no norm is there, nor that before the first layer's attention.
    """

    facts: JoinedConfig
    draft_ids: None = None

    def __init__(self, facts: JoinedConfig) -> None:
        config = deepcopy(facts.layers)
        super().__init__(config)
        self.facts = facts
        self.model: Any = MODEL_MAPPING[type(config)](config)
        self.model.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)  # whose scale, if any, enorm takes back
        norm_class, self.model.norm = type(self.model.norm), nn.Identity()
        self.eh_proj = nn.Linear(2 * facts.width, facts.width, bias=facts.join_bias)
        self.lm_head = nn.Linear(facts.width, facts.vocab_size, bias=False)
        if facts.joins_normed:
            self.enorm, self.hnorm, self.norm = (norm_class(facts.width, eps=config.rms_norm_eps) for _ in range(3))
        else:
            self.enorm, self.hnorm, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
            self.model.layers[0].input_layernorm = nn.Identity()
        self._is_exchanged = False

    @cached_property
    def kv_shapes(self) -> Sequence[tuple[Shape, Shape]]:
        """Shapes as a forward over one entry shows them: layers with latent attention cache two things unlike."""
        cache, device = DynamicCache(), self.device
        feature = torch.zeros(1, 1, self.facts.width, dtype=self.dtype, device=device)
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self.run(nothing, feature, nothing, cache)
        layers: list[Any] = cache.layers
        return [tuple((kept.shape[1], kept.shape[3]) for kept in (layer.keys, layer.values)) for layer in layers]

    def make_rotary(self, device: torch.device) -> None:
        self.model.rotary_emb = type(self.model.rotary_emb)(config=self.config).to(device)

    def misreadings(self) -> Sequence[Misreading]:
        exchanged = ("with embedding and feature exchanged", self._exchanged())
        if not self.facts.joins_normed:
            return (exchanged,)
        return exchanged, ("with the norms of embedding and features swapped", swapped(self, "enorm", "hnorm"))

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.model.embed_tokens(input_ids)  # [1, T, d]
        parts = [self.enorm(embedded), self.hnorm(features.to(embedded.dtype))]
        if self._is_exchanged:
            parts.reverse()
        joined = self.eh_proj(torch.cat(parts, dim=-1))  # [1, T, d]
        output = self.model(
            inputs_embeds=joined, position_ids=position_ids, past_key_values=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._is_exchanged = True
        try:
            yield
        finally:
            self._is_exchanged = False
