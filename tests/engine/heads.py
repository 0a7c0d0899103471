"""Tiny random heads in the layouts that people hold, and the forward of a head written straight down in float64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.tiny_models import random_model, save

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, DRAFT_VOCAB = 8, 64, 4, 2, 16, 96, 97, 31
"""n, d = dt, H, KV, hd, ffn, V, Vd."""
EPS = 1e-5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
}


def target(folder: Path, vocab_size: int = VOCAB, **more: Any) -> str:
    """Write a target and return its folder."""
    shape = {**SHAPE, "vocab_size": vocab_size, "num_hidden_layers": LAYERS, "eos_token_id": 5, **more}
    return save(random_model(LlamaConfig(**shape), seed=3), folder)


@dataclass
class Eagle3:
    """A head as it was trained: what the straight forward computes, whatever the files say."""

    taps: tuple[int, ...] = (2, 4, 5)
    """h[k]: the default for 8 layers."""
    opening_norm: str = "none"
    residual_normed: bool = False
    carry_normed: bool = False
    head_normed: bool = True
    num_layers: int = 1
    qk_norms: bool = False
    theta: float = 10000.0
    draft_vocab: int = DRAFT_VOCAB
    target_width: int = WIDTH
    leaves_out: tuple[str, ...] = ()
    """Tensors that the file lacks: the target's are used."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """With speculators' names, float32, complete."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        wide = len(self.taps) * self.target_width

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * 0.9 / columns**0.5

        def norm(size: int) -> Tensor:
            return 0.4 + 1.2 * torch.rand(size, generator=generator)

        made = {"fc.weight": matrix(WIDTH, wide), "norm.weight": norm(WIDTH)}
        made["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH, generator=generator)
        made["lm_head.weight"] = 3 * matrix(self.draft_vocab, WIDTH)
        for i in range(self.num_layers):
            at, inner = f"layers.{i}.", WIDTH * (2 if i == 0 else 1)
            if i == 0:
                made[at + "hidden_norm.weight"] = norm(WIDTH)
            made[at + "input_layernorm.weight"] = norm(WIDTH)
            made[at + "post_attention_layernorm.weight"] = norm(WIDTH)
            made[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, inner)
            made[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, inner)
            made[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, inner)
            made[at + "self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * HEAD_DIM)
            made[at + "mlp.gate_proj.weight"], made[at + "mlp.up_proj.weight"] = matrix(FFN, WIDTH), matrix(FFN, WIDTH)
            made[at + "mlp.down_proj.weight"] = matrix(WIDTH, FFN)
            if self.qk_norms:
                made[at + "self_attn.q_norm.weight"] = norm(HEAD_DIM)
                made[at + "self_attn.k_norm.weight"] = norm(HEAD_DIM)
        if self.opening_norm == "each":
            made.update({f"fc_norm.{i}.weight": norm(self.target_width) for i in range(len(self.taps))})
        elif self.opening_norm == "all":
            made["input_norm.weight"] = norm(wide)
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

    def write(self, folder: Path, config: dict[str, Any], *, midlayer: bool = True, pickled: bool = False) -> str:
        """Write the head's files with that config.json and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        old, new = ("layers.0.", "midlayer.") if midlayer else ("", "")
        tensors = {name.replace(old, new, 1): t for name, t in self.tensors.items() if name not in self.leaves_out}
        (folder / "config.json").write_text(json.dumps(config))
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return str(folder)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the features [T, d] of the target's hidden states [n + 1, T, dt] float64."""
        taps = [hidden[k] for k in self.taps]
        if self.opening_norm == "each":
            taps = [_rms(tap, self._get(f"fc_norm.{i}.weight")) for i, tap in enumerate(taps)]
        line = torch.cat(taps, dim=-1)
        if self.opening_norm == "all":
            line = _rms(line, self._get("input_norm.weight"))
        return line @ self._get("fc.weight").T

    def forward(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [T, Vd] and carries [T, d] of features [T, d] and as many ids, at positions 0 to T - 1."""
        x, num = features, len(ids)
        for i in range(self.num_layers):
            at = f"layers.{i}."
            normed = _rms(x, self._get(at + ("hidden_norm.weight" if i == 0 else "input_layernorm.weight")))
            residual, inner = x, normed
            if i == 0:
                embedded = self._get("embed_tokens.weight")[torch.tensor(ids)]
                inner = torch.cat([_rms(embedded, self._get(at + "input_layernorm.weight")), normed], dim=-1)
                residual = normed if self.residual_normed else x
            y = residual + self._attend(at + "self_attn.", inner, num)
            z = _rms(y, self._get(at + "post_attention_layernorm.weight"))
            gate, up = z @ self._get(at + "mlp.gate_proj.weight").T, z @ self._get(at + "mlp.up_proj.weight").T
            x = y + (gate * torch.sigmoid(gate) * up) @ self._get(at + "mlp.down_proj.weight").T
        normed = _rms(x, self._get("norm.weight"))
        logits = (normed if self.head_normed else x) @ self._get("lm_head.weight").T
        return logits, normed if self.carry_normed else x

    def carried(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """As `forward`, where ids beyond the features take the carry of the entry before them."""
        while len(features) < len(ids):
            _, carries = self.forward(features, ids[: len(features)])
            features = torch.cat([features, carries[-1:]])
        return self.forward(features, ids)

    def _attend(self, at: str, inner: Tensor, num: int) -> Tensor:
        q, k, v = (
            (inner @ self._get(f"{at}{name}_proj.weight").T).view(num, -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )  # [heads, T, hd]
        if self.qk_norms:
            q, k = _rms(q, self._get(at + "q_norm.weight")), _rms(k, self._get(at + "k_norm.weight"))
        q, k = self._rotate(q), self._rotate(k)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 0), v.repeat_interleave(HEADS // KV_HEADS, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
        scores = scores.masked_fill(torch.ones(num, num, dtype=torch.bool).triu(1), -math.inf)
        out = torch.softmax(scores, -1) @ v  # [H, T, hd]
        return out.transpose(0, 1).reshape(num, -1) @ self._get(at + "o_proj.weight").T

    def _rotate(self, x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies  # [T, hd / 2]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def _get(self, name: str) -> Tensor:
        return self.tensors[name].double()


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


@lru_cache
def hidden_states(num: int, width: int = WIDTH) -> Tensor:
    """[n + 1, T, dt] float64, of no model; layers differ as much as positions do."""
    return torch.randn(LAYERS + 1, num, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
