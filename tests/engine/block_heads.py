"""Tiny random heads of blocks in the layouts that people hold, and their forward written straight down in float64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.heads import EPS, FFN, HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH

BLOCK, MASK, RANK = 5, 96, 6


def default_taps(num_taps: int) -> tuple[int, ...]:
    """h[k] that z-lab takes for so many layers of a draft."""
    return tuple(round(1 + i * (LAYERS - 4) / (num_taps - 1)) + 1 for i in range(num_taps))


@dataclass
class BlockHead:
    """A head as it was trained: what the straight forward computes, whatever the files say."""

    taps: tuple[int, ...] = (2, 6)
    """h[k]."""
    num_layers: int = 2
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    theta: float = 10000.0
    draft_vocab: int = VOCAB
    from_anchor: bool = False
    markov: str | None = None
    """DSpark's kind; None for DFlash."""
    leaves_out: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight")
    """Tensors that the file lacks: the target's are used."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(12)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * 0.9 / columns**0.5

        def norm(size: int) -> Tensor:
            return 0.4 + 1.2 * torch.rand(size, generator=generator)

        made = {"fc.weight": matrix(WIDTH, len(self.taps) * WIDTH), "hidden_norm.weight": norm(WIDTH)}
        made["norm.weight"] = norm(WIDTH)
        made["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH, generator=generator)
        made["lm_head.weight"] = 3 * matrix(self.draft_vocab, WIDTH)
        for i in range(self.num_layers):
            at = f"layers.{i}."
            made[at + "input_layernorm.weight"], made[at + "post_attention_layernorm.weight"] = norm(WIDTH), norm(WIDTH)
            made[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, WIDTH)
            made[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, WIDTH)
            made[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, WIDTH)
            made[at + "self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * HEAD_DIM)
            made[at + "self_attn.q_norm.weight"], made[at + "self_attn.k_norm.weight"] = norm(HEAD_DIM), norm(HEAD_DIM)
            made[at + "mlp.gate_proj.weight"], made[at + "mlp.up_proj.weight"] = matrix(FFN, WIDTH), matrix(FFN, WIDTH)
            made[at + "mlp.down_proj.weight"] = matrix(WIDTH, FFN)
        if self.markov is not None:
            made["markov_head.markov_w1.weight"] = torch.randn(VOCAB, RANK, generator=generator)
            made["markov_head.markov_w2.weight"] = 2 * matrix(self.draft_vocab, RANK)
        if self.markov == "gated":
            made["markov_head.gate_proj.weight"] = 2 * matrix(RANK, WIDTH + RANK)
            made["markov_head.gate_proj.bias"] = torch.randn(RANK, generator=generator)
        if self.markov == "rnn":
            made["markov_head.joint_proj.weight"] = 2 * matrix(3 * RANK, 2 * RANK + WIDTH)
            made["markov_head.joint_proj.bias"] = torch.randn(3 * RANK, generator=generator)
        if self.draft_vocab != VOCAB:
            kept = torch.randperm(VOCAB, generator=generator)[: self.draft_vocab].sort().values
            made["d2t"] = kept - torch.arange(self.draft_vocab)
            made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
        self.tensors = made

    @property
    def ids(self) -> Tensor:
        """[Vd], the target ids of the head's rows."""
        return torch.arange(self.draft_vocab) + self.tensors.get("d2t", 0)

    def adopt(self, target_tensors: dict[str, Tensor]) -> None:
        """Take from the target what the file will leave out."""
        if "embed_tokens.weight" in self.leaves_out:
            self.tensors["embed_tokens.weight"] = target_tensors["model.embed_tokens.weight"]
        if "lm_head.weight" in self.leaves_out:
            self.tensors["lm_head.weight"] = target_tensors["lm_head.weight"][self.ids]

    def write(self, folder: Path, config: dict[str, Any], **more: Tensor) -> str:
        """Write the head's files with that config.json, and more tensors, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in self.leaves_out}
        save_file({name: t.contiguous() for name, t in {**kept, **more}.items()}, folder / "model.safetensors")
        return str(folder)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [T, d] of the target's hidden states [n + 1, T, dt] float64."""
        line = torch.cat([hidden[k] for k in self.taps], dim=-1)
        return _rms(line @ self._get("fc.weight").T, self._get("hidden_norm.weight"))

    def forward(self, rows: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [Q, Vd] and hidden states [Q, d] of a block of these ids behind rows [C, d]."""
        x = self._get("embed_tokens.weight")[torch.tensor(ids)]
        for i in range(self.num_layers):
            at = f"layers.{i}."
            z = _rms(x, self._get(at + "input_layernorm.weight"))
            x = x + self._attend(i, z, rows)
            z = _rms(x, self._get(at + "post_attention_layernorm.weight"))
            gate, up = z @ self._get(at + "mlp.gate_proj.weight").T, z @ self._get(at + "mlp.up_proj.weight").T
            x = x + (gate * torch.sigmoid(gate) * up) @ self._get(at + "mlp.down_proj.weight").T
        hidden = _rms(x, self._get("norm.weight"))
        return hidden @ self._get("lm_head.weight").T, hidden

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
        latent = self._get("markov_head.markov_w1.weight")[token]
        if self.markov == "gated":
            z = torch.cat([hidden, latent])
            gate = self._get("markov_head.gate_proj.weight") @ z + self._get("markov_head.gate_proj.bias")
            latent = torch.sigmoid(gate) * latent
        if self.markov == "rnn":
            z = torch.cat([state, latent, hidden])
            z = self._get("markov_head.joint_proj.weight") @ z + self._get("markov_head.joint_proj.bias")
            keeps = torch.sigmoid(z[:RANK])
            state = keeps * state + (1 - keeps) * torch.tanh(z[RANK : 2 * RANK])
            latent = torch.tanh(z[2 * RANK :])
        return self._get("markov_head.markov_w2.weight") @ latent, state

    def _attend(self, layer: int, z: Tensor, rows: Tensor) -> Tensor:
        at, num_rows, num = f"layers.{layer}.self_attn.", len(rows), len(z)
        read = torch.cat([rows, z])
        q = (z @ self._get(at + "q_proj.weight").T).view(num, -1, HEAD_DIM).transpose(0, 1)  # [H, Q, hd]
        k, v = (
            (read @ self._get(f"{at}{name}_proj.weight").T).view(num_rows + num, -1, HEAD_DIM).transpose(0, 1)
            for name in "kv"
        )
        q = self._rotate(_rms(q, self._get(at + "q_norm.weight")), num_rows)
        k = self._rotate(_rms(k, self._get(at + "k_norm.weight")), 0)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 0), v.repeat_interleave(HEADS // KV_HEADS, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
        for i in range(num):
            for j in range(num_rows + num):
                apart, window = num_rows + i - j, self.windows[layer]
                if (apart < 0 and self.causal[layer]) or (window is not None and abs(apart) >= window):
                    scores[:, i, j] = -math.inf
        out = torch.softmax(scores, -1) @ v  # [H, Q, hd]
        return out.transpose(0, 1).reshape(num, -1) @ self._get(at + "o_proj.weight").T

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        half = HEAD_DIM // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (first + torch.arange(x.shape[1], dtype=torch.float64))[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def _get(self, name: str) -> Tensor:
        return self.tensors[name].double()


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight
