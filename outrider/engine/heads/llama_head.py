"""Heads whose layers are Llama's or Qwen 3's: their configuration, and the modules around the layers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from outrider.engine.heads.network import HeadFacts, HeadNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFacts(HeadFacts):
    """Configuration of a head that consists of a projection of hidden states and layers like Llama's."""

    layers: LlamaConfig
    taps: tuple[int, ...]
    """Indices of the target's hidden states that the projection reads: 0 = the embeddings, k = the output of layer k
    (from 1), -1 = the last output after the final norm."""
    target_width: int
    """dt, width of the target's hidden states."""


def llama_layers(like: Any, width: int, vocab_size: int, num_layers: int, rope: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of a head's layers: shapes and attention of the layers of `like`, another model's
    config, with the width, vocabulary size, number of layers and rotary parameters given here.

    Raises AttributeError if `like` lacks the fields of a Llama config.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=like.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.num_key_value_heads,
        head_dim=getattr(like, "head_dim", None) or like.hidden_size // like.num_attention_heads,
        max_position_embeddings=like.max_position_embeddings,
        rms_norm_eps=like.rms_norm_eps,
        rope_parameters=dict(rope),
        attention_bias=getattr(like, "attention_bias", False),
    )


class LlamaHead(HeadNetwork):
    """Base class of heads with layers of Llama's shapes and rotary positions. Subclasses add the module `layers`."""

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, facts: Any) -> None:
        """Create the modules around the layers. facts: configuration of the head, a `LlamaFacts`."""
        super().__init__(deepcopy(facts.layers), facts)
        self.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)
        self.norm = LlamaRMSNorm(facts.width, eps=self.config.rms_norm_eps)
        self.lm_head = nn.Linear(facts.width, facts.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(self.config)
