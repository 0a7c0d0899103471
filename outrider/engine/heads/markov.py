"""DSpark's sequential head: a bias on a block's logits that depends on the token before, place by place."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]
"""vanilla: of the token alone; gated: the hidden state of the place says how much of it; rnn: a state goes along."""


class MarkovHead(nn.Module):
    """Its tensors have the names that DeepSpec, SpecForge and speculators give them."""

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
