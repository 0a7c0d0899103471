"""Medusa's heads (2401.10774) and blockwise ones (1811.03115): one residual network a head over one hidden state.

Head i says what stands 2 + i tokens behind the token whose hidden state it reads, whatever stands in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.reduced_vocab import spread


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Facts of the heads, whatever layout their files have."""

    num_heads: int
    num_layers: int
    """Residual layers of a head; 0 for none."""
    width: int
    """Of the target's hidden states, after its final norm, which the heads read."""
    vocab_size: int
    """V, of the target."""
    draft_vocab_size: int
    """Rows of a projection."""
    shares_projection: bool
    """Whether all heads have one projection, as blockwise ones have the target's."""
    has_bias: bool = True
    """Whether the residual layers have one."""
    scale: float = 1.0
    """Factor on the logits."""


class MedusaHeads(nn.Module):
    """All heads of a checkpoint. Its tensors have vLLM's names: blocks.{head}.layers.{layer} and lm_heads.{head}."""

    draft_ids: Tensor | None
    """[Vd] int64, the target ids of a projection's rows; None where they are all ids."""

    def __init__(self, facts: MedusaConfig) -> None:
        super().__init__()
        self.facts = facts
        self.dtype = torch.get_default_dtype()
        self.device = torch.get_default_device()
        self.blocks = nn.ModuleList(_Block(facts) for _ in range(facts.num_heads))
        num_projections = 1 if facts.shares_projection else facts.num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(facts.width, facts.draft_vocab_size, bias=False) for _ in range(num_projections)
        )
        is_reduced = facts.draft_vocab_size != facts.vocab_size
        self.register_buffer("draft_ids", torch.arange(facts.draft_vocab_size) if is_reduced else None)

    @classmethod
    def of(cls, facts: MedusaConfig, tensors: Mapping[str, Tensor]) -> MedusaHeads:
        """Return heads over these tensors, named as `state_dict` does, in eval mode; nothing is copied.

        Raises RuntimeError for tensors that are missing, unknown or of another shape.
        """
        with torch.device("meta"):
            heads = cls(facts)
        heads.load_state_dict(dict(tensors), assign=True)
        projection = tensors["lm_heads.0.weight"]
        heads.dtype = projection.dtype
        heads.device = projection.device
        return heads.eval().requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., num_heads, V] float32 (float64 where the heads are) of hidden states [..., dt], which
        may be on another device and of another dtype.
        """
        hidden = to_device(hidden, self.device).to(self.dtype)
        inner = torch.stack([block(hidden) for block in self.blocks], dim=-2)  # [..., num_heads, dt]
        if self.facts.shares_projection:
            logits = self.lm_heads[0](inner)  # [..., num_heads, Vd]
        else:
            logits = torch.stack([head(inner[..., i, :]) for i, head in enumerate(self.lm_heads)], dim=-2)
        if self.facts.scale != 1.0:
            logits = logits * self.facts.scale
        return spread(logits, self.draft_ids, self.facts.vocab_size)


class _Block(nn.Module):
    """A head's residual layers, x + SiLU(W x + b)."""

    def __init__(self, facts: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(facts.width, facts.width, bias=facts.has_bias) for _ in range(facts.num_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden
