"""DFlash (2602.06036), and DSpark's backbone, as a small transformers model: one pass says a block of positions.

An entry of its cache is a row, what the target's `OpeningMap` made of a committed token, at that token's position. A
block follows them: the last committed token, the anchor, and masks behind it. All layers read the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, rotate_half

from outrider.engine.heads.head_network import LlamaFacts, LlamaHead, Misreading
from outrider.engine.heads.markov import MarkovHead, MarkovKind
from outrider.engine.heads.reduced_vocab import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LlamaFacts):
    """Facts of a DFlash or DSpark head."""

    windows: tuple[int | None, ...]
    """By layer, the keys that a query sees at most, its own included; None for all."""
    causal: tuple[bool, ...]
    """By layer, whether a token of the block sees no later one."""
    block_size: int
    """B, the anchor and the masks."""
    mask_id: int
    from_anchor: bool = False
    """Whether the anchor's place says the token after it and the last mask's the B-th; else a mask's place says what
    stands there, and the anchor's says nothing."""
    has_bias: bool = False
    """Whether the attention's linear layers have one."""
    embedding_scale: float = 1.0
    """Of the table's rows, where a block's tokens are embedded."""
    markov_rank: int = 0
    """r, of DSpark's sequential head; 0 for none."""
    markov_kind: MarkovKind = "vanilla"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def num_drafts(self) -> int:
        """Tokens behind the anchor that a block says."""
        return self.block_size if self.from_anchor else self.block_size - 1


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What a forward says at the N places of blocks that were asked for."""

    logits: Tensor
    """[1, N, V] float32 (float64 where the head is), UNMAPPED where the head has no row; without the bias of DSpark's
    sequential head."""
    hidden: Tensor
    """[1, N, d] in the head's dtype, after the final norm: what the sequential head reads."""


class DFlashHead(LlamaHead):
    """The network behind the opening map."""

    facts: DFlashConfig

    def __init__(self, facts: DFlashConfig) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList(_Layer(self.config, facts, index) for index in range(facts.num_layers))
        self.norm = nn.RMSNorm(facts.width, eps=facts.epsilon)
        self.lm_head = nn.Linear(facts.width, facts.draft_vocab_size, bias=False)
        self.markov_head = None
        if facts.markov_rank:
            sizes = (facts.vocab_size, facts.draft_vocab_size, facts.markov_rank, facts.width)
            self.markov_head = MarkovHead(facts.markov_kind, *sizes)

    def misreadings(self) -> Sequence[Misreading]:
        facts = self.facts
        place, size = ("later", facts.block_size + 1) if facts.from_anchor else ("earlier", facts.block_size - 1)
        off_by_one = replace(facts, from_anchor=not facts.from_anchor, block_size=size)  # which says as many tokens
        found = [(f"reading one place {place}", self.decided(off_by_one))]
        if facts.embedding_scale != 1:
            found.append(("with unscaled embeddings", self.decided(replace(facts, embedding_scale=1.0))))
        return found

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> BlockOutput:
        """Run over C rows, features [1, C, d], and Q places of blocks, input_ids [1, Q] int64; either may be none.

        position_ids: [1, C + Q], those of the rows first; None for a single block behind all rows.
        logits_to_keep: places of blocks [N] int64 that are wanted, or how many of the last; 0 for all.
        """
        num_rows, num_places = features.shape[1], input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(num_rows + num_places, device=input_ids.device)[None]
        hidden = self.embed_tokens(input_ids) * self.facts.embedding_scale  # [1, Q, d]
        rows = features.to(hidden.dtype)
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rows, rotary, past_key_values)
        if not num_places:
            return BlockOutput(hidden.new_empty(1, 0, self.facts.vocab_size), hidden)
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = self.norm(hidden[:, wanted])  # [1, N, d]
        return BlockOutput(spread(self.lm_head(hidden), self.draft_ids, self.facts.vocab_size), hidden)

    def with_biases(self, logits: Tensor, biases: Tensor) -> Tensor:
        """Return logits [N, V] with biases [N, Vd] of their rows added, in the logits' precision."""
        if self.draft_ids is None:
            return logits + biases.to(logits.dtype)
        return logits.index_add(-1, self.draft_ids, biases.to(logits.dtype))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, facts: DFlashConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(facts.width, eps=facts.epsilon)
        self.self_attn = _Attention(config, facts, index)
        self.post_attention_layernorm = nn.RMSNorm(facts.width, eps=facts.epsilon)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, rows: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        """Return [1, Q, d] of hidden [1, Q, d] and rows [1, C, d], which this layer does not norm."""
        attended = self.self_attn(self.input_layernorm(hidden), rows, rotary, cache)
        if attended is None:
            return hidden
        hidden = hidden + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class _Attention(nn.Module):
    """Qwen 3's attention, whose queries are the block's alone and whose keys are the rows', too."""

    def __init__(self, config: LlamaConfig, facts: DFlashConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, index
        self.window, self.is_causal = facts.windows[index], facts.causal[index]
        self.head_dim, self.scaling = facts.head_dim, facts.head_dim**-0.5
        self.num_key_value_groups = facts.num_heads // facts.num_kv_heads
        wide, narrow = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        self.q_proj = nn.Linear(facts.width, wide, bias=facts.has_bias)
        self.k_proj = nn.Linear(facts.width, narrow, bias=facts.has_bias)
        self.v_proj = nn.Linear(facts.width, narrow, bias=facts.has_bias)
        self.o_proj = nn.Linear(wide, facts.width, bias=facts.has_bias)
        self.q_norm = nn.RMSNorm(facts.head_dim, eps=facts.epsilon)
        self.k_norm = nn.RMSNorm(facts.head_dim, eps=facts.epsilon)

    def forward(self, inner: Tensor, rows: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor | None:
        """Return [1, Q, d] of inner [1, Q, d] and rows [1, C, d]; None where the block has no place."""
        num_places, read = inner.shape[1], torch.cat([rows, inner], dim=1)  # [1, C + Q, d]
        shape = (1, read.shape[1], -1, self.head_dim)
        key = _rotated(self.k_norm(self.k_proj(read).view(shape)).transpose(1, 2), rotary)  # [1, KV, C + Q, hd]
        value = self.v_proj(read).view(shape).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if not num_places:
            return None
        cos, sin = (each[:, -num_places:] for each in rotary)
        query = self.q_norm(self.q_proj(inner).view(1, num_places, -1, self.head_dim)).transpose(1, 2)
        query = _rotated(query, (cos, sin))  # [1, H, Q, hd]
        mask = None if cache is not None else self._mask(num_places, key.shape[2], key.device)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        how = (
            {"is_causal": self.is_causal, "sliding_window": self.window} if cache is not None else {"is_causal": False}
        )
        output, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **how)  # [1, Q, H, hd]
        projected: Tensor = self.o_proj(output.flatten(2))
        return projected

    def _mask(self, num_places: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Return which keys the places see, [1, 1, Q, C + Q] bool, where our cache does not say it; None for all."""
        if not self.is_causal and self.window is None:
            return None
        keys = torch.arange(num_keys, device=device)
        ahead = keys[None] - keys[-num_places:, None]  # [Q, C + Q]
        sees = ahead <= (0 if self.is_causal else num_keys)
        if self.window is not None:
            sees &= ahead.abs() < self.window
        return sees[None, None]


def _rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return states [1, heads, T, hd] turned to their positions, of which rotary has cosines and sines [1, T, hd]."""
    cos, sin = (each[:, None] for each in rotary)
    return states * cos + rotate_half(states) * sin
