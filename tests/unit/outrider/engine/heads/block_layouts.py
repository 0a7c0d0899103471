"""Tiny random heads of blocks in the layouts that people hold, and their forward written straight down in float64."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.outrider.engine.heads.layouts import LAYERS, VOCAB, WIDTH, Draws, Head, write

BLOCK, MASK, RANK = 5, 96, 6


def default_taps(num_taps: int) -> tuple[int, ...]:
    """h[k] that z-lab takes for so many layers of a draft."""
    return tuple(round(1 + i * (LAYERS - 4) / (num_taps - 1)) + 1 for i in range(num_taps))


@dataclass
class BlockHead(Head):
    leaves_out: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight")
    taps: tuple[int, ...] = (2, 6)
    """h[k]."""
    num_layers: int = 2
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    from_anchor: bool = False
    markov: str | None = None
    """DSpark's kind; None for DFlash."""

    def __post_init__(self) -> None:
        draws = Draws(12)
        made = {"fc.weight": draws.matrix(WIDTH, len(self.taps) * WIDTH), "hidden_norm.weight": draws.norm(WIDTH)}
        made["norm.weight"] = draws.norm(WIDTH)
        made |= draws.vocabulary(self.draft_vocab)
        for i in range(self.num_layers):
            made |= draws.layer(f"layers.{i}.", qk_norms=True)
        if self.markov is not None:
            made["markov_head.markov_w1.weight"] = draws.normal(VOCAB, RANK)
            made["markov_head.markov_w2.weight"] = 2 * draws.matrix(self.draft_vocab, RANK)
        if self.markov == "gated":
            made["markov_head.gate_proj.weight"] = 2 * draws.matrix(RANK, WIDTH + RANK)
            made["markov_head.gate_proj.bias"] = draws.normal(RANK)
        if self.markov == "rnn":
            made["markov_head.joint_proj.weight"] = 2 * draws.matrix(3 * RANK, 2 * RANK + WIDTH)
            made["markov_head.joint_proj.bias"] = draws.normal(3 * RANK)
        self.tensors = made | draws.maps(self.draft_vocab)

    def write(self, folder: Path, config: dict[str, Any], **more: Tensor) -> str:
        """Write the head's files with that config.json, and more tensors, and return the folder."""
        return write({**self.said(), **more}, folder, config)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [T, d] of the target's hidden states [n + 1, T, dt] float64."""
        return self.norm(self.linear(torch.cat([hidden[k] for k in self.taps], dim=-1), "fc"), "hidden_norm")

    def forward(self, rows: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [Q, Vd] and hidden states [Q, d] of a block of these ids behind rows [C, d]."""
        x = self.get("embed_tokens.weight")[torch.tensor(ids)]
        apart = torch.arange(len(rows), len(rows) + len(ids))[:, None] - torch.arange(
            len(rows) + len(ids)
        )  # [Q, C + Q]
        for i in range(self.num_layers):
            at, window = f"layers.{i}.", self.windows[i]
            sees = (apart >= (0 if self.causal[i] else -len(ids))) & (apart.abs() < (window or math.inf))
            z = self.norm(x, f"{at}input_layernorm")
            x = x + self.attend(f"{at}self_attn.", z, torch.cat([rows, z]), sees)
            x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), f"{at}mlp.")
        hidden = self.norm(x, "norm")
        return self.linear(hidden, "lm_head"), hidden

    def says(self, rows: Tensor, anchor: int, path: list[int], size: int = BLOCK) -> Tensor:
        """Return the logits [len(path) + 1, Vd] of what follows the anchor and each token of a path behind it."""
        logits, hidden = self.forward(rows, [anchor, *[MASK] * (size - 1)])
        first = 0 if self.from_anchor else 1
        found, state = [], torch.zeros(RANK, dtype=torch.float64)
        for place, token in enumerate([anchor, *path]):
            bias, state = self._bias(token, hidden[first + place], state)
            found.append(logits[first + place] + bias)
        return torch.stack(found)

    def _bias(self, token: int, hidden: Tensor, state: Tensor) -> tuple[Tensor | float, Tensor]:
        if self.markov is None:
            return 0.0, state
        latent = self.get("markov_head.markov_w1.weight")[token]
        if self.markov == "gated":
            latent = torch.sigmoid(self.linear(torch.cat([hidden, latent]), "markov_head.gate_proj")) * latent
        if self.markov == "rnn":
            z = self.linear(torch.cat([state, latent, hidden]), "markov_head.joint_proj")
            keeps = torch.sigmoid(z[:RANK])
            state = keeps * state + (1 - keeps) * torch.tanh(z[RANK : 2 * RANK])
            latent = torch.tanh(z[2 * RANK :])
        return self.linear(latent, "markov_head.markov_w2"), state
