"""Tiny random heads that join embedding and feature, in the layouts that people hold, and their straight forward in
float64: EAGLE-1 over Llama's layer, MTP over GLM's, DeepSeek's, Qwen 3's and Qwen3-Next's.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from tests.tiny_models import random_model, save
from tests.unit.outrider.engine.heads.layouts import LAYERS, SHAPE, VOCAB, WIDTH, Carrying, Draws, write

ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
ROUTED |= {"topk_group": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": False},
    "glm4_moe": {**ROUTED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    | {"use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": ROUTED
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 12, "v_head_dim": 10, "head_dim": 8},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


@dataclass
class Joined(Carrying):
    family: str = "llama"
    normed: bool = True
    """Whether embedding and feature are normed before they are joined, and the output before the lm_head."""
    carry_normed: bool = False
    bias: bool = False
    qkv_bias: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    target_width: int = WIDTH
    whole: dict[str, Tensor] = field(default_factory=dict)
    """Of a target of that family."""

    def __post_init__(self) -> None:
        self.shape = {**SHAPE, "num_hidden_layers": LAYERS, "eos_token_id": 5, **SHAPES[self.family]}
        self.offset = 1.0 if self.family == "qwen3_next" else 0.0

    def target(self, folder: Path) -> str:
        """Write a target, take a layer more that it is made with as the head's, and return the folder."""
        last = {"layer_types": ["linear_attention"] * LAYERS + ["full_attention"]}
        types = last if self.family == "qwen3_next" else {}
        config = CONFIG_MAPPING[self.family](**{**self.shape, "num_hidden_layers": LAYERS + 1, **types})
        save(random_model(config, seed=3), folder)
        whole, at = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
        self.whole = {name: tensor for name, tensor in whole.items() if not name.startswith(at)}
        self._make({f"layers.0.{name.removeprefix(at)}": t for name, t in whole.items() if name.startswith(at)})
        said = json.loads((folder / "config.json").read_text())
        said["num_hidden_layers"] = LAYERS
        for key in ("layer_types", "mlp_layer_types"):
            if key in said:
                said[key] = said[key][:LAYERS]
        (folder / "config.json").write_text(json.dumps(said))
        save_file(self.whole, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    def _make(self, layer: dict[str, Tensor]) -> None:
        draws = Draws(11)

        def norm(size: int) -> Tensor:
            return draws.norm(size) - self.offset

        self.tensors = {name: norm(len(t)) if name.endswith("norm.weight") else t.clone() for name, t in layer.items()}
        for name, tensor in self.tensors.items():
            if name.endswith(("e_score_correction_bias", "_proj.bias")):
                self.tensors[name] = 0.3 * draws.normal(*tensor.shape)
        if not self.normed:
            del self.tensors["layers.0.input_layernorm.weight"]
        for name in "qkv" if self.qkv_bias else "":
            rows = self.tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
            self.tensors[f"layers.0.self_attn.{name}_proj.bias"] = draws.normal(rows)
        self.tensors |= draws.vocabulary(VOCAB)
        self.tensors["eh_proj.weight"] = draws.normal(WIDTH, 2 * WIDTH) / WIDTH**0.5
        if self.bias:
            self.tensors["eh_proj.bias"] = draws.normal(WIDTH)
        if self.normed:
            self.tensors |= {f"{name}.weight": norm(WIDTH) for name in ("enorm", "hnorm", "norm")}

    def write_eagle1(self, folder: Path, leaves_out: tuple[str, ...] = ("lm_head.weight",), **config: Any) -> str:
        """Write an EAGLE-1 head; what it leaves out is the target's."""
        for name in leaves_out:
            self.tensors[name] = self.whole[name if name == "lm_head.weight" else f"model.{name}"]
        tensors = {name.replace("eh_proj", "fc"): t for name, t in self.tensors.items() if name not in leaves_out}
        said = {**self.shape, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
        return write(tensors, folder, {**said, "bias": self.bias, **config})

    def write_in_target(self, target: str, at: int = LAYERS, num_layers: int = 1) -> str:
        """Put an MTP head into the target's checkpoint behind its layers, as DeepSeek and GLM do."""
        names = {"norm.weight": "shared_head.norm.weight", "lm_head.weight": "shared_head.head.weight"}
        own = {names.get(name, name.removeprefix("layers.0.")): t for name, t in self.tensors.items()}
        more = {f"model.layers.{at + i}.{name}": t + i for i in range(num_layers) for name, t in own.items()}
        return _more(target, {**self.whole, **more}, num_nextn_predict_layers=num_layers)

    def write_as_qwen(self, target: str) -> str:
        """Put an MTP head into the target's checkpoint under `mtp.`; it has the target's embedding and lm_head."""
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
        return _more(target, {**self.whole, **self._without_vocabulary("mtp.", names)}, num_nextn_predict_layers=1)

    def write_as_speculators(self, folder: Path) -> str:
        """Write an MTP head of its own, which has the target's embedding and lm_head."""
        names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
        names["norm"] = "final_layernorm"
        named = self._without_vocabulary("mtp_layers.0.", names)
        tensors = {name.replace("mtp_layers.0.layers.0.", "mtp_layers.0."): tensor for name, tensor in named.items()}
        inner = {**self.shape, "model_type": self.family}
        return write(tensors, folder, {"speculators_model_type": "mtp", "transformer_layer_config": inner})

    def _without_vocabulary(self, prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
        self.tensors["embed_tokens.weight"] = self.whole["model.embed_tokens.weight"]
        self.tensors["lm_head.weight"] = self.whole["lm_head.weight"]
        own = {name: t for name, t in self.tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
        first = {name: name.split(".")[0] for name in own}
        return {
            prefix + name.replace(first[name], names.get(first[name], first[name]), 1): t for name, t in own.items()
        }

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the features [T, d] of the target's hidden states [n + 1, T, d] float64."""
        return hidden[-1]

    def forward(self, features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] and carries [T, d] of features [T, d] and as many ids, at positions 0 to T - 1."""
        embedded = self.get("embed_tokens.weight")[torch.tensor(ids)]
        parts = [embedded, features]
        if self.normed:
            parts = [self.norm(embedded, "enorm"), self.norm(features, "hnorm")]
        x = self.linear(torch.cat(parts, -1), "eh_proj")
        z = self.norm(x, "layers.0.input_layernorm") if self.normed else x
        y = x + (self._latent(z) if self.family == "deepseek_v3" else self._attend(z))
        z = self.norm(y, "layers.0.post_attention_layernorm")
        y = y + (self.mlp(z, "layers.0.mlp.") if "layers.0.mlp.gate_proj.weight" in self.tensors else self._experts(z))
        normed = self.norm(y, "norm") if self.normed else y
        return normed @ self.get("lm_head.weight").T, normed if self.carry_normed else y

    def _attend(self, z: Tensor) -> Tensor:
        at, size = "layers.0.self_attn.", self.shape["head_dim"]
        q, k, v = (self.linear(z, f"{at}{name}_proj").view(len(z), -1, size) for name in "qkv")
        gate = None
        if self.family == "qwen3_next":  # a head's query, and then its gate
            q, gate = self.linear(z, at + "q_proj").view(len(z), -1, 2 * size).chunk(2, dim=-1)
        if at + "q_norm.weight" in self.tensors:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        turned = int(size * self.shape.get("rope_parameters", {}).get("partial_rotary_factor", 1.0))
        q, k = (torch.cat([_rotated(x[..., :turned]), x[..., turned:]], -1) for x in (q, k))
        shared = q.shape[1] // k.shape[1]
        out = _softmaxed(q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))
        out = out if gate is None else out * torch.sigmoid(gate)
        return self.linear(out.flatten(1), at + "o_proj")

    def _latent(self, z: Tensor) -> Tensor:
        at, shape, num = "layers.0.self_attn.", self.shape, len(z)
        turned, plain = shape["qk_rope_head_dim"], shape["qk_nope_head_dim"]
        low = self.norm(self.linear(z, at + "q_a_proj"), at + "q_a_layernorm", 1e-6)
        q = self.linear(low, at + "q_b_proj").view(num, -1, plain + turned)
        low, k_turned = self.linear(z, at + "kv_a_proj_with_mqa").split([shape["kv_lora_rank"], turned], -1)
        low = self.norm(low, at + "kv_a_layernorm", 1e-6)
        k, v = self.linear(low, at + "kv_b_proj").view(num, q.shape[1], -1).split([plain, shape["v_head_dim"]], -1)
        k_turned = _rotated(_by_pairs(k_turned)[:, None]).expand(-1, q.shape[1], -1)
        q = torch.cat([q[..., :plain], _rotated(_by_pairs(q[..., plain:]))], -1)
        return self.linear(_softmaxed(q, torch.cat([k, k_turned], -1), v).flatten(1), at + "o_proj")

    def _experts(self, z: Tensor) -> Tensor:
        at = "layers.0.mlp."
        logits, is_qwen = z @ self.get(at + "gate.weight").T, self.family == "qwen3_next"
        scores = torch.softmax(logits, -1) if is_qwen else torch.sigmoid(logits)
        best = scores if is_qwen else scores + self.get(at + "gate.e_score_correction_bias")
        chosen = best.topk(self.shape["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.shape.get("routed_scaling_factor", 1.0)
        outputs = torch.stack([self.mlp(z, f"{at}experts.{i}.") for i in range(scores.shape[1])], 1)  # [T, E, d]
        routed = (outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)
        if is_qwen:
            shared = torch.sigmoid(z @ self.get(at + "shared_expert_gate.weight").T)
            return routed + shared * self.mlp(z, at + "shared_expert.")
        return routed + self.mlp(z, at + "shared_experts.")


def _softmaxed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, H, dv] of q, k [T, H, d] and v [T, H, dv], causal."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1), v)


def _by_pairs(x: Tensor) -> Tensor:
    """Lay numbers that are turned in neighbouring pairs out as halves."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def _rotated(x: Tensor) -> Tensor:
    """Turn x [T, H, d] at positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * 1e4 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _more(target: str, tensors: dict[str, Tensor], **config: Any) -> str:
    path = Path(target) / "config.json"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, Path(target) / "model.safetensors")
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


Made = tuple[Joined, str, str]
"""A head, its folder, and its target's."""


def eagle1(folder: Path, leaves_out: tuple[str, ...] = ("lm_head.weight",), **more: Any) -> Made:
    head = Joined(normed=False, **more)
    target = head.target(folder / "target")
    return head, head.write_eagle1(folder / "head", leaves_out), target


def in_target(folder: Path, family: str, num_layers: int = 1, **more: Any) -> Made:
    head = Joined(family=family, **more)
    target = head.target(folder)
    return head, head.write_in_target(target, num_layers=num_layers), target


def as_qwen(folder: Path) -> Made:
    head = Joined(family="qwen3_next", carry_normed=True)
    target = head.target(folder)
    return head, head.write_as_qwen(target), target


def as_speculators(folder: Path, family: str) -> Made:
    head = Joined(family=family, carry_normed=True)
    target = head.target(folder / "target")
    return head, head.write_as_speculators(folder / "head"), target


CASES: dict[str, Callable[[Path], Made]] = {
    "EAGLE-1": lambda folder: eagle1(folder, bias=True),
    "EAGLE-1, all of the target's": lambda folder: eagle1(folder, ("lm_head.weight", "embed_tokens.weight")),
    "EAGLE-1, biases of queries": lambda folder: eagle1(folder, bias=True, qkv_bias=True),
    "MTP of DeepSeek": lambda folder: in_target(folder, "deepseek_v3"),
    "MTP of GLM, two layers": lambda folder: in_target(folder, "glm4_moe", 2, carry_normed=True),
    "MTP of Llama's layers": lambda folder: in_target(folder, "llama"),
    "MTP of speculators": lambda folder: as_speculators(folder, "qwen3"),
    "MTP of speculators, experts": lambda folder: as_speculators(folder, "glm4_moe"),
    "MTP of Qwen": as_qwen,
}
