"""Heads that join a token's embedding and a feature in one projection and run decoder layers over it: EAGLE-1 and 2
(2401.15077, 2406.16858), and the MTP heads of DeepSeek-V3 (2412.19437), GLM and their like.

The layers are transformers' own, of the configuration's class, so that latent attention and experts need nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from outrider.engine.heads.network import CarryHead, HeadFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedConfig(HeadFacts):
    """Facts of a head, whatever layout its files have. All ids have a row of the lm_head."""

    layers: PreTrainedConfig
    """Of the decoder layers: so many, of that class, of the head's width and the target's vocabulary."""
    joins_normed: bool
    """Whether embedding and feature are normed before they are joined, and the output before the lm_head (MTP)."""
    join_bias: bool = False
    """Whether the projection of both has a bias (EAGLE-1)."""
    is_exchanged: bool = False
    """Whether the feature comes before the embedding, as where files are misread."""
    swaps_norms: bool = False
    """Whether the norms of both stand in each other's place, as where files are misread."""

    @classmethod
    def of(cls, layers: PreTrainedConfig, **facts: bool) -> JoinedConfig:
        """Return the facts of a head of these layers."""
        sizes = {"vocab_size": layers.vocab_size, "draft_vocab_size": layers.vocab_size}
        return cls(layers=layers, width=layers.hidden_size, **sizes, **facts)


class JoinedHead(CarryHead):
    """y = layers(eh_proj(cat[enorm(embedding), hnorm(feature)])), and lm_head(norm(y)).

    In EAGLE-1 no norm is there, nor that before the first layer's attention.
    """

    facts: JoinedConfig

    def __init__(self, facts: JoinedConfig) -> None:
        config = deepcopy(facts.layers)
        super().__init__(config, facts)
        self.model: Any = MODEL_MAPPING[type(config)](config)
        norm_class = type(self.model.norm)
        self.model.embed_tokens, self.model.norm = nn.Identity(), nn.Identity()
        self.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)  # whose scale, if any, enorm takes back
        self.eh_proj = nn.Linear(2 * facts.width, facts.width, bias=facts.join_bias)
        self.lm_head = nn.Linear(facts.width, facts.vocab_size, bias=False)
        if facts.joins_normed:
            self.enorm, self.hnorm, self.norm = (norm_class(facts.width, eps=config.rms_norm_eps) for _ in range(3))
        else:
            self.enorm, self.hnorm, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
            self.model.layers[0].input_layernorm = nn.Identity()

    def make_rotary(self, device: torch.device) -> None:
        self.model.rotary_emb = type(self.model.rotary_emb)(config=self.config).to(device)

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        found = [("with embedding and feature exchanged", replace(self.facts, is_exchanged=True))]
        if self.facts.joins_normed:
            found.append(("with the norms of embedding and features swapped", replace(self.facts, swaps_norms=True)))
        return found

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        enorm, hnorm = (self.hnorm, self.enorm) if self.facts.swaps_norms else (self.enorm, self.hnorm)
        parts = [enorm(embedded), hnorm(features.to(embedded.dtype))]
        if self.facts.is_exchanged:
            parts.reverse()
        joined = self.eh_proj(torch.cat(parts, dim=-1))  # [1, T, d]
        output = self.model(
            inputs_embeds=joined, position_ids=position_ids, past_key_values=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden
