"""Heads whose layers are Llama's: their facts, and the parts that their networks are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import Cache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from outrider.engine.heads.network import HeadFacts, HeadNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFacts(HeadFacts):
    """Facts of a head of Llama's layers behind an opening map."""

    num_layers: int = 1
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    """Of every norm, the opening map's too."""
    rope: Mapping[str, Any]
    """transformers' rope_parameters."""
    taps: tuple[int, ...]
    """Hidden states of the target that the opening map reads, as `OpeningSpec.taps`."""
    target_width: int
    """Of the target's hidden states."""
    trained_context: int = 2048
    """Tokens of the context in training, which some kinds of rotary scaling count from. No limit."""


def shape_of(layers: Any) -> dict[str, Any]:
    """Return the facts of LlamaFacts that the configuration of a model's layers gives, but for the rotary positions.

    Raises AttributeError for layers that are not shaped like Llama's.
    """
    return {
        "ffn_width": layers.intermediate_size,
        "num_heads": layers.num_attention_heads,
        "num_kv_heads": layers.num_key_value_heads,
        "head_dim": getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        "epsilon": layers.rms_norm_eps,
        "trained_context": layers.max_position_embeddings,
    }


class LlamaHead(HeadNetwork):
    """A head whose layers have Llama's shapes and rotary positions. Its class adds `layers`."""

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, facts: Any) -> None:
        """Make what is not in the layers. facts: a LlamaFacts."""
        config = LlamaConfig(
            vocab_size=facts.vocab_size,
            hidden_size=facts.width,
            intermediate_size=facts.ffn_width,
            num_hidden_layers=facts.num_layers,
            num_attention_heads=facts.num_heads,
            num_key_value_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            max_position_embeddings=facts.trained_context,
            rms_norm_eps=facts.epsilon,
            rope_parameters=dict(facts.rope),
        )
        super().__init__(config, facts)
        self.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)
        self.norm = HeadNorm(facts.width, eps=facts.epsilon)
        self.lm_head = nn.Linear(facts.width, facts.draft_vocab_size, bias=False)
        self.make_rotary(self.embed_tokens.weight.device)

    def make_rotary(self, device: torch.device) -> None:
        self.rotary_emb = LlamaRotaryEmbedding(self.config).to(device)


class HeadNorm(nn.RMSNorm):
    """An RMS norm in its input's dtype, which in training need not be the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadAttention(nn.Module):
    """Llama's attention, of queries that may be fewer than the keys and of inputs that may be wider than the model."""

    def __init__(
        self,
        config: LlamaConfig,
        index: int,
        input_width: int,
        *,
        has_norms: bool,
        has_bias: bool = False,
        has_output_bias: bool = False,
        is_causal: bool = True,
        window: int | None = None,
    ) -> None:
        """index: of the layer. has_norms: whether queries and keys are normed, head by head (Qwen 3). window: keys that
        a query sees at most, its own included; None for all.
        """
        super().__init__()
        self.config, self.layer_idx = config, index
        self.is_causal, self.window = is_causal, window
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_width, wide, bias=has_bias)
        self.k_proj = nn.Linear(input_width, narrow, bias=has_bias)
        self.v_proj = nn.Linear(input_width, narrow, bias=has_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=has_output_bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if has_norms:
            self.q_norm = HeadNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = HeadNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, inner: Tensor, read: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        """Return [1, Q, d] of inner [1, Q, i], the last of read [1, K, i]; Q may be 0."""
        num_queries = inner.shape[1]
        key = _rotated(self.k_norm(self._heads(self.k_proj(read))), rotary)  # [1, KV, K, hd]
        value = self._heads(self.v_proj(read))
        mask = None
        limits: dict[str, Any] = {"is_causal": self.is_causal, "sliding_window": self.window}
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        else:
            mask = self._mask(num_queries, key.shape[2], key.device)
            limits = {"is_causal": False}
        if not num_queries:
            return inner
        cos, sin = rotary
        query = self.q_norm(self._heads(self.q_proj(inner)))
        query = _rotated(query, (cos[:, -num_queries:], sin[:, -num_queries:]))  # [1, H, Q, hd]
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **limits)  # [1, Q, H, hd]
        projected: Tensor = self.o_proj(output.flatten(2))
        return projected

    def _heads(self, states: Tensor) -> Tensor:
        """Return states [1, heads, T, hd] of states [1, T, heads * hd]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Return which keys the queries see, [1, 1, Q, K] bool, where our cache does not say it; None for all."""
        if not self.is_causal and self.window is None:
            return None
        keys = torch.arange(num_keys, device=device)
        ahead = keys[None] - keys[num_keys - num_queries :, None]  # [Q, K]
        sees = ahead <= (0 if self.is_causal else num_keys)
        if self.window is not None:
            sees &= ahead.abs() < self.window
        return sees[None, None]


def _rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return states [1, heads, T, hd] turned to their positions, of which rotary has cosines and sines [1, T, hd]."""
    cos, sin = rotary
    return states * cos[:, None] + rotate_half(states) * sin[:, None]
