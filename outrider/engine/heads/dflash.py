"""DFlash (2602.06036) and DSpark, as a small transformers model: one pass fills a block of positions.

An entry of its cache is a feature at its token's position. A block follows the features: the last committed token, the
anchor, and masks behind it. All layers read the same features. DSpark adds a sequential head, a bias on the logits of a
place that depends on the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import Cache

from outrider.engine.heads.llama_head import AttentionBias, HeadLayer, LlamaFacts, LlamaHead
from outrider.engine.heads.network import BlockHead, BlockShape, HeadFacts

MarkovKind = Literal["vanilla", "gated", "rnn"]
"""vanilla: of the token alone; gated: the hidden state of the place says how much of it; rnn: a state goes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LlamaFacts):
    """Facts of a DFlash or DSpark head."""

    carries_normed: bool = True
    windows: tuple[int | None, ...]
    """By layer, the keys that a query sees at most, its own included; None for all."""
    causal: tuple[bool, ...]
    """By layer, whether a token of the block sees no later one."""
    block: BlockShape
    bias: AttentionBias = "none"
    embedding_scale: float = 1.0
    """Of the table's rows, where a block's tokens are embedded."""
    markov_rank: int = 0
    """r, of DSpark's sequential head; 0 for none."""
    markov_kind: MarkovKind = "vanilla"


class DFlashHead(LlamaHead, BlockHead):
    """The network behind the opening map."""

    facts: DFlashConfig

    def __init__(self, facts: DFlashConfig) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList()
        for index, (is_causal, window) in enumerate(zip(facts.causal, facts.windows, strict=True)):
            limits = {"is_causal": is_causal, "window": window}
            self.layers.append(HeadLayer(self.config, index, facts.width, has_norms=True, bias=facts.bias, **limits))
        self.markov_head = None
        if facts.markov_rank:
            sizes = (facts.vocab_size, facts.draft_vocab_size, facts.markov_rank, facts.width)
            self.markov_head = MarkovHead(facts.markov_kind, *sizes)

    @property
    def block(self) -> BlockShape:
        return self.facts.block

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        facts, block = self.facts, self.block
        place, size = ("later", block.size + 1) if block.from_anchor else ("earlier", block.size - 1)
        off_by_one = replace(block, from_anchor=not block.from_anchor, size=size)  # which proposes as many tokens
        found = [(f"reading one place {place}", replace(facts, block=off_by_one))]
        if facts.embedding_scale != 1:
            found.append(("with unscaled embeddings", replace(facts, embedding_scale=1.0)))
        return found

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) * self.facts.embedding_scale  # [1, Q, d]
        read = features.to(hidden.dtype)  # [1, C, d]
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, read, rotary, cache)
        return hidden

    def biased(self, logits: Tensor, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
        markov = self.markov_head
        if markov is None:
            return logits
        state, latents = markov.begin()[None], list[Tensor]()
        for place, token_id in enumerate(token_ids):
            latent, state = markov.step(torch.tensor([token_id], device=self.device), hidden[place : place + 1], state)
            latents.append(latent)
        return self.with_biases(logits, markov.biases(torch.cat(latents)))

    def with_biases(self, logits: Tensor, biases: Tensor) -> Tensor:
        """Return logits [N, V] with biases [N, Vd] of their columns added, in the logits' precision."""
        if self.draft_ids is None:
            return logits + biases.to(logits.dtype)
        return logits.index_add(-1, self.draft_ids, biases.to(logits.dtype))


class MarkovHead(nn.Module):
    """DSpark's sequential head. Its tensors have the names that DeepSpec, SpecForge and speculators give them."""

    def __init__(self, kind: MarkovKind, vocab_size: int, draft_vocab_size: int, rank: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def begin(self) -> Tensor:
        """Return the state [r] before a block's first place."""
        return torch.zeros_like(self.markov_w1.weight[0])

    def step(self, token_ids: Tensor, hidden: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and states [N, r] after places with hidden states [N, d], before which the tokens token_ids
        [N] int64 stand and which the states [N, r] lead to.
        """
        embedded = self.markov_w1(token_ids)  # [N, r]
        if self.kind == "vanilla":
            return embedded, states
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, states
        gate, candidate, latent = self.joint_proj(torch.cat([states, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(latent), gate * states + (1 - gate) * torch.tanh(candidate)

    def biases(self, latents: Tensor) -> Tensor:
        """Return what is added to the logits, [N, Vd] in the head's dtype, of latents [N, r]."""
        biases: Tensor = self.markov_w2(latents)
        return biases
