"""Heads whose layers are Llama's: their facts, and the parts that their networks are made of."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import Cache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from outrider.engine.heads.network import HeadFacts, HeadNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFacts(HeadFacts):
    """Facts of a head of Llama's layers behind an opening map."""

    layers: LlamaConfig
    taps: tuple[int, ...]
    """Hidden states of the target that the opening map reads, as `OpeningSpec.taps`."""
    target_width: int
    """Of the target's hidden states."""

    @property
    def epsilon(self) -> float:
        """Of every norm, the opening map's too."""
        epsilon: float = self.layers.rms_norm_eps
        return epsilon


def llama_layers(like: Any, width: int, vocab_size: int, num_layers: int, rope: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of a head's layers, with the shapes of the layers of another model.

    Raises AttributeError for layers that are not shaped like Llama's.
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
    )


AttentionBias = Literal["none", "inputs", "all"]
"""Which linear layers of an attention have a bias: those of queries, keys and values, or that of the output, too."""


class LlamaHead(HeadNetwork):
    """A head whose layers have Llama's shapes and rotary positions. Its class adds `layers`."""

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, facts: Any) -> None:
        """Make what is not in the layers. facts: a LlamaFacts."""
        super().__init__(deepcopy(facts.layers), facts)
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
        bias: AttentionBias = "none",
        is_causal: bool = True,
        window: int | None = None,
    ) -> None:
        """index: of the layer. has_norms: whether queries and keys are normed, head by head (Qwen 3). window: keys that
        a query sees at most, its own included; None for all.
        """
        super().__init__()
        self.config, self.layer_idx = config, index
        self.is_causal, self.window = is_causal, window
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        narrow = config.num_key_value_heads * self.head_dim
        wide = narrow * self.num_key_value_groups
        self.q_proj = nn.Linear(input_width, wide, bias=bias != "none")
        self.k_proj = nn.Linear(input_width, narrow, bias=bias != "none")
        self.v_proj = nn.Linear(input_width, narrow, bias=bias != "none")
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=bias == "all")
        norms: list[nn.Module] = [nn.Identity(), nn.Identity()]
        if has_norms:
            norms = [HeadNorm(self.head_dim, eps=config.rms_norm_eps) for _ in norms]
        self.q_norm, self.k_norm = norms

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


class HeadLayer(nn.Module):
    """A decoder layer like Llama's, whose attention may also read what stands before its own tokens."""

    def __init__(self, config: LlamaConfig, index: int, input_width: int, **attention: Any) -> None:
        """input_width: of what its attention reads. attention: as `HeadAttention`."""
        super().__init__()
        self.input_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = HeadAttention(config, index, input_width, **attention)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, before: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        """Return [B, Q, d] of hidden [B, Q, d] and what stands before, [B, C, d], which this layer does not norm."""
        inner = self.input_layernorm(hidden)
        return self.add(hidden, self.self_attn(inner, torch.cat([before, inner], dim=1), rotary, cache))

    def add(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output, of what its attention found."""
        hidden = residual + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def _rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return states [1, heads, T, hd] turned to their positions, of which rotary has cosines and sines [1, T, hd]."""
    cos, sin = rotary
    return states * cos[:, None] + rotate_half(states) * sin[:, None]
