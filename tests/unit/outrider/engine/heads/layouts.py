"""Tiny random heads in the layouts that people hold, and the forward of a head written straight down in float64."""

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
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": FFN, "rms_norm_eps": EPS}
SHAPE |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
SHAPE |= {"max_position_embeddings": 128}


def target(folder: Path, vocab_size: int = VOCAB, **more: Any) -> str:
    """Write a target and return its folder."""
    shape = {**SHAPE, "vocab_size": vocab_size, "num_hidden_layers": LAYERS, "eos_token_id": 5, **more}
    return save(random_model(LlamaConfig(**shape), seed=3), folder)


class Draws:
    """Random weights of heads over Llama's layers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self.normal(rows, columns) * 0.9 / columns**0.5

    def norm(self, size: int) -> Tensor:
        return 0.4 + 1.2 * torch.rand(size, generator=self.generator)

    def vocabulary(self, draft_vocab: int) -> dict[str, Tensor]:
        """Return embedding and lm_head."""
        return {"embed_tokens.weight": self.normal(VOCAB, WIDTH), "lm_head.weight": 3 * self.matrix(draft_vocab, WIDTH)}

    def maps(self, draft_vocab: int) -> dict[str, Tensor]:
        """Return which ids the lm_head's rows are of, where they are not all."""
        if draft_vocab == VOCAB:
            return {}
        kept = torch.randperm(VOCAB, generator=self.generator)[:draft_vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
        return {"d2t": kept - torch.arange(draft_vocab), "t2d": t2d}

    def layer(self, at: str, *, inner: int = WIDTH, qk_norms: bool) -> dict[str, Tensor]:
        """Return a layer whose attention reads `inner` numbers."""
        shapes = {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, inner),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inner),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inner),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            **({"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)} if qk_norms else {}),
            "mlp.gate_proj": (FFN, WIDTH),
            "mlp.up_proj": (FFN, WIDTH),
            "mlp.down_proj": (WIDTH, FFN),
        }
        return {
            f"{at}{name}.weight": (self.matrix if shape[1:] else self.norm)(*shape) for name, shape in shapes.items()
        }


@dataclass
class Head:
    """A head as it was trained: what the straight forward computes, whatever the files say."""

    draft_vocab: int = VOCAB
    theta: float = 10000.0
    leaves_out: tuple[str, ...] = ()
    """Tensors that the file lacks: the target's are used."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """With speculators' names, float32, complete."""
    offset = 0.0
    """Added to weights of norms."""

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

    def said(self) -> dict[str, Tensor]:
        """Return what the file holds."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.leaves_out}

    def get(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def norm(self, x: Tensor, name: str, epsilon: float = EPS) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * (self.get(f"{name}.weight") + self.offset)

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.get(f"{name}.weight").T
        return out + self.get(f"{name}.bias") if f"{name}.bias" in self.tensors else out

    def mlp(self, x: Tensor, at: str) -> Tensor:
        gate = self.linear(x, f"{at}gate_proj")
        return self.linear(gate * torch.sigmoid(gate) * self.linear(x, f"{at}up_proj"), f"{at}down_proj")

    def attend(self, at: str, asking: Tensor, read: Tensor, sees: Tensor) -> Tensor:
        """Return what entries find, the last of those that are read. asking [Q, i], read [K, i], sees [Q, K] bool."""
        q = self._heads(asking, f"{at}q_proj", f"{at}q_norm")
        k = self._heads(read, f"{at}k_proj", f"{at}k_norm")
        v = self._heads(read, f"{at}v_proj").repeat_interleave(HEADS // KV_HEADS, 0)
        q = self._rotate(q, len(read) - len(asking))
        k = self._rotate(k).repeat_interleave(HEADS // KV_HEADS, 0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)).masked_fill(~sees, -math.inf)
        out = torch.softmax(scores, -1) @ v  # [H, Q, hd]
        return self.linear(out.transpose(0, 1).reshape(len(asking), -1), f"{at}o_proj")

    def _heads(self, x: Tensor, name: str, norm: str | None = None) -> Tensor:
        """Return [heads, T, hd], normed where there is such a norm."""
        out = self.linear(x, name).view(len(x), -1, HEAD_DIM).transpose(0, 1)
        return self.norm(out, norm) if f"{norm}.weight" in self.tensors else out

    def _rotate(self, x: Tensor, first: int = 0) -> Tensor:
        half = HEAD_DIM // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (first + torch.arange(x.shape[1], dtype=torch.float64))[:, None] * frequencies  # [T, hd / 2]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Carrying(Head):
    """One whose own output is the feature of what follows."""

    def forward(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [T, Vd] and carries [T, d] of features [T, d] and as many ids, at positions 0 to T - 1."""
        raise NotImplementedError

    def carried(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """As `forward`, where ids beyond the features take the carry of the entry before them."""
        while len(features) < len(ids):
            _, carries = self.forward(features, ids[: len(features)])
            features = torch.cat([features, carries[-1:]])
        return self.forward(features, ids)


@dataclass
class Eagle3(Carrying):
    draft_vocab: int = DRAFT_VOCAB
    taps: tuple[int, ...] = (2, 4, 5)
    """h[k]: the default for 8 layers."""
    projection_norm: str = "none"
    residual_normed: bool = False
    carry_normed: bool = False
    head_normed: bool = True
    num_layers: int = 1
    qk_norms: bool = False
    target_width: int = WIDTH

    def __post_init__(self) -> None:
        draws, wide = Draws(11), len(self.taps) * self.target_width
        made = {"fc.weight": draws.matrix(WIDTH, wide), "norm.weight": draws.norm(WIDTH)}
        made |= draws.vocabulary(self.draft_vocab)
        made["layers.0.hidden_norm.weight"] = draws.norm(WIDTH)
        for i in range(self.num_layers):
            made |= draws.layer(f"layers.{i}.", inner=WIDTH * (2 if i == 0 else 1), qk_norms=self.qk_norms)
        if self.projection_norm == "each":
            made |= {f"fc_norm.{i}.weight": draws.norm(self.target_width) for i in range(len(self.taps))}
        elif self.projection_norm == "all":
            made["input_norm.weight"] = draws.norm(wide)
        self.tensors = made | draws.maps(self.draft_vocab)

    def write(self, folder: Path, config: dict[str, Any], *, midlayer: bool = True, pickled: bool = False) -> str:
        """Write the head's files with that config.json and return the folder."""
        old, new = ("layers.0.", "midlayer.") if midlayer else ("", "")
        return write({name.replace(old, new, 1): t for name, t in self.said().items()}, folder, config, pickled=pickled)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the features [T, d] of the target's hidden states [n + 1, T, dt] float64."""
        taps = [hidden[k] for k in self.taps]
        if self.projection_norm == "each":
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        line = torch.cat(taps, dim=-1)
        return self.linear(self.norm(line, "input_norm") if self.projection_norm == "all" else line, "fc")

    def forward(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        x, sees = features, torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for i in range(self.num_layers):
            at = f"layers.{i}."
            residual, inner = x, self.norm(x, f"{at}input_layernorm") if i else x
            if i == 0:
                normed = self.norm(x, f"{at}hidden_norm")
                embedded = self.get("embed_tokens.weight")[torch.tensor(ids)]
                inner = torch.cat([self.norm(embedded, f"{at}input_layernorm"), normed], dim=-1)
                residual = normed if self.residual_normed else x
            y = residual + self.attend(f"{at}self_attn.", inner, inner, sees)
            x = y + self.mlp(self.norm(y, f"{at}post_attention_layernorm"), f"{at}mlp.")
        normed = self.norm(x, "norm")
        return self.linear(normed if self.head_normed else x, "lm_head"), normed if self.carry_normed else x


def write(tensors: dict[str, Tensor], folder: Path, config: dict[str, Any], *, pickled: bool = False) -> str:
    """Write a head's files and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@lru_cache
def hidden_states(num: int, width: int = WIDTH) -> Tensor:
    """[n + 1, T, dt] float64, of no model; layers differ as much as positions do."""
    return torch.randn(LAYERS + 1, num, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
