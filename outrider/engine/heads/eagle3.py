"""EAGLE-3 and 3.1 (2503.01840), and P-EAGLE, whose network is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import Cache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from outrider.engine.heads.carry_head import CarryHead
from outrider.engine.heads.head_network import LlamaFacts, LlamaHead, Misreading, swapped
from outrider.engine.heads.opening import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LlamaFacts):
    """Facts of an EAGLE-3 head."""

    norm: Norm = "none"
    """Norm of the opening map."""
    num_layers: int = 1
    norm_before_residual: bool = False
    """Whether the first residual is the feature after its norm."""
    carries_normed: bool = False
    """Whether a carry is the output after the final norm (3.1)."""
    reads_normed: bool = True
    """Whether the lm_head reads the output after the final norm."""
    qk_norms: bool = False
    """Whether queries and keys are normed, head by head (Qwen 3)."""
    qkv_bias: bool = False


class Eagle3Head(LlamaHead, CarryHead):
    """The network behind the opening map. Its tensors have speculators' names; see `formats`."""

    facts: Eagle3Config

    def __init__(self, facts: Eagle3Config) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList(_Layer(self.config, facts, index) for index in range(facts.num_layers))
        self.norm = _norm(facts.width, facts)
        self.lm_head = nn.Linear(facts.width, facts.draft_vocab_size, bias=False)

    def decide(self, facts: Eagle3Config) -> None:
        """Go on with other facts, of which none changes a tensor: what is carried, read, or the first residual."""
        super().decide(facts)
        first = self.layers[0]
        assert isinstance(first, _Layer)
        first.norm_before_residual = facts.norm_before_residual

    def misreadings(self) -> Sequence[Misreading]:
        norms = swapped(self.layers[0], "input_layernorm", "hidden_norm")
        is_normed = self.facts.norm_before_residual
        residual = self.decided(replace(self.facts, norm_before_residual=not is_normed))
        return (
            ("with the norms of embedding and features swapped", norms),
            (f"with the first residual {'un' * is_normed}normed", residual),
        )

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        hidden = features.to(embedded.dtype)
        rotary = self.rotary_emb(embedded, position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded if index == 0 else None, rotary, cache)
        return hidden

    def read(self, hidden: Tensor, normed: Tensor) -> Tensor:
        return normed if self.facts.reads_normed else hidden


class _Layer(nn.Module):
    """A decoder layer; the first reads a token's embedding beside the feature."""

    def __init__(self, config: LlamaConfig, facts: Eagle3Config, index: int) -> None:
        super().__init__()
        self.norm_before_residual = facts.norm_before_residual
        if index == 0:
            self.hidden_norm = _norm(facts.width, facts)
        self.input_layernorm = _norm(facts.width, facts)
        self.self_attn = _Attention(config, facts, index)
        self.post_attention_layernorm = _norm(facts.width, facts)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: Tensor, embedded: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:
        """Return [1, T, d] of hidden [1, T, d] and, in the first layer, embedded [1, T, d]."""
        if embedded is None:
            residual, inner = hidden, self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inner = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [1, T, 2d]
        hidden = residual + self.self_attn(inner, rotary, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class _Attention(nn.Module):
    """Llama's attention over an input that may be wider than the model."""

    is_causal = True

    def __init__(self, config: LlamaConfig, facts: Eagle3Config, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, index
        self.head_dim, self.scaling = facts.head_dim, facts.head_dim**-0.5
        self.num_key_value_groups = facts.num_heads // facts.num_kv_heads
        inner, bias = facts.width * (2 if index == 0 else 1), facts.qkv_bias
        self.q_proj = nn.Linear(inner, facts.num_heads * facts.head_dim, bias=bias)
        self.k_proj = nn.Linear(inner, facts.num_kv_heads * facts.head_dim, bias=bias)
        self.v_proj = nn.Linear(inner, facts.num_kv_heads * facts.head_dim, bias=bias)
        self.o_proj = nn.Linear(facts.num_heads * facts.head_dim, facts.width, bias=False)
        self.q_norm = _norm(facts.head_dim, facts) if facts.qk_norms else nn.Identity()
        self.k_norm = _norm(facts.head_dim, facts) if facts.qk_norms else nn.Identity()

    def forward(self, inner: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        """Return [1, T, d] of inner [1, T, d or 2d]."""
        shape = (*inner.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(inner).view(shape)).transpose(1, 2)  # [1, H, T, hd]
        key = self.k_norm(self.k_proj(inner).view(shape)).transpose(1, 2)  # [1, KV, T, hd]
        value = self.v_proj(inner).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = attend(self, query, key, value, None, dropout=0.0, scaling=self.scaling)  # [1, T, H, hd]
        projected: Tensor = self.o_proj(output.flatten(2))
        return projected


class _Norm(nn.RMSNorm):
    """An RMS norm in its input's dtype, which in training need not be the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _norm(width: int, facts: Eagle3Config) -> nn.RMSNorm:
    return _Norm(width, eps=facts.epsilon)
