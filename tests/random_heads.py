"""Random draft heads for a target in a folder, in layouts that people hold, for tests of whole services."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.tiny_models import tiny_llama

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8


def random_eagle3(
    target: str, folder: Path, *, width: int = 16, seed: int = 5, sharpness: float = 2.0, taps: tuple[int, ...] = (0, 1)
) -> str:
    """Write an EAGLE-3 head of the target's whole vocabulary, as speculators lays it out; return its folder."""
    config = AutoConfig.from_pretrained(target)
    generator, vocab_size, ffn = torch.Generator().manual_seed(seed), config.vocab_size, 2 * width

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    layer = {"hidden_norm.weight": torch.ones(width), "input_layernorm.weight": torch.ones(width)}
    layer |= _layer(matrix, width, 2 * width, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, ffn)
    tensors = {
        "fc.weight": matrix(width, len(taps) * config.hidden_size),
        "norm.weight": torch.ones(width),
        "embed_tokens.weight": torch.randn(vocab_size, width, generator=generator),
        "lm_head.weight": sharpness * matrix(vocab_size, width),
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }
    inner = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    described = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": vocab_size,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "transformer_layer_config": inner,
    }
    return _write(folder, tensors, described)


def random_peagle(target: str, folder: Path, *, mask_id: int = 1, seed: int = 7) -> str:
    """Write an EAGLE-3 head that says it was trained to fill masks; return its folder."""
    random_eagle3(target, folder, seed=seed)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    num_read = tensors["fc.weight"].shape[1]
    tensors["mask_hidden"] = torch.randn(1, 1, num_read, generator=torch.Generator().manual_seed(seed))
    return _write(folder, tensors, {**config, "speculators_model_type": "peagle", "mask_token_id": mask_id})


def random_eagle1(target: str, folder: Path, *, seed: int = 8) -> str:
    """Write an EAGLE-1 head for a Llama, with a layer like its own and its lm_head; return its folder."""
    config = json.loads(Path(target, "config.json").read_text())
    tensors = {name: tensor for name, tensor in _joined(config, seed).items() if name not in NORMS}
    tensors["fc.weight"] = tensors.pop("eh_proj.weight")
    tensors["fc.bias"] = torch.zeros(config["hidden_size"])
    return _write(folder, tensors, {**config, "num_hidden_layers": 1})


def random_mtp(target: str, folder: Path, *, seed: int = 9) -> str:
    """Write a copy of the target, a Llama, with an MTP head behind its layers; return its folder."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    at = f"model.layers.{config['num_hidden_layers']}."
    renamed = {"norm.weight": "shared_head.norm.weight"}
    own = {
        at + renamed.get(name, name.removeprefix("layers.0.")): tensor for name, tensor in _joined(config, seed).items()
    }
    tensors = load_file(folder / "model.safetensors") | own
    return _write(folder, tensors, {**config, "num_nextn_predict_layers": 1})


NORMS = ("enorm.weight", "hnorm.weight", "norm.weight", "layers.0.input_layernorm.weight")
"""Of an MTP head, which EAGLE-1 does not have."""


def _joined(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Return a head that joins embedding and feature, without an lm_head, over a layer of such a Llama."""
    generator, width = torch.Generator().manual_seed(seed), config["hidden_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    head_dim = width // config["num_attention_heads"]
    layer = _layer(matrix, width, width, width, config["num_key_value_heads"] * head_dim, config["intermediate_size"])
    return {
        "embed_tokens.weight": torch.randn(config["vocab_size"], width, generator=generator),
        "eh_proj.weight": matrix(width, 2 * width),
        **{name: torch.ones(width) for name in NORMS},
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }


def _layer(
    matrix: Callable[[int, int], Tensor], width: int, inner: int, heads: int, kv_heads: int, ffn: int
) -> dict[str, Tensor]:
    """Return Llama's layer without the norm before its attention, which reads `inner` numbers; widths of all heads."""
    return {
        "post_attention_layernorm.weight": torch.ones(width),
        "self_attn.q_proj.weight": matrix(heads, inner),
        "self_attn.k_proj.weight": matrix(kv_heads, inner),
        "self_attn.v_proj.weight": matrix(kv_heads, inner),
        "self_attn.o_proj.weight": matrix(width, heads),
        "mlp.gate_proj.weight": matrix(ffn, width),
        "mlp.up_proj.weight": matrix(ffn, width),
        "mlp.down_proj.weight": matrix(width, ffn),
    }


def random_medusa(target: str, folder: Path, *, num_heads: int = 3, seed: int = 6, sharpness: float = 2.0) -> str:
    """Write Medusa heads of one layer each; return their folder."""
    config = AutoConfig.from_pretrained(target)
    generator, width = torch.Generator().manual_seed(seed), config.hidden_size
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width, generator=generator) / width**0.5
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        weight = torch.randn(config.vocab_size, width, generator=generator)
        tensors[f"{head}.1.weight"] = sharpness * weight / width**0.5
    return _write(folder, tensors, {"medusa_num_heads": num_heads, "medusa_num_layers": 1})


def random_dflash(
    target: str,
    folder: Path,
    *,
    num_drafts: int = 3,
    mask_id: int = 1,
    markov: str | None = None,
    seed: int = 7,
    sharpness: float = 2.0,
) -> str:
    """Write a DFlash head, as z-lab lays it out, or DSpark with a sequential head of that kind, as SpecForge does, with
    the target's embedding and lm_head left out; return its folder.
    """
    config, rank = AutoConfig.from_pretrained(target), 4
    generator, width, vocab_size = torch.Generator().manual_seed(seed), config.hidden_size, config.vocab_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    layer = {
        "input_layernorm.weight": torch.ones(width),
        "post_attention_layernorm.weight": torch.ones(width),
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": matrix(width, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        "mlp.gate_proj.weight": matrix(2 * width, width),
        "mlp.up_proj.weight": matrix(2 * width, width),
        "mlp.down_proj.weight": matrix(width, 2 * width),
    }
    tensors = {
        "fc.weight": matrix(width, 2 * width),
        "hidden_norm.weight": torch.ones(width),
        "norm.weight": sharpness * torch.ones(width),
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }
    block: dict[str, object] = {"mask_token_id": mask_id, "target_layer_ids": [-1, 0]}
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = torch.randn(vocab_size, rank, generator=generator)
        tensors["markov_head.markov_w2.weight"] = matrix(vocab_size, rank)
        block |= {"projector_type": "dspark", "markov_rank": rank, "markov_head_type": markov}
    if markov == "gated":
        tensors["markov_head.gate_proj.weight"] = matrix(rank, width + rank)
        tensors["markov_head.gate_proj.bias"] = torch.zeros(rank)
    elif markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = matrix(3 * rank, 2 * rank + width)
        tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
    described: dict[str, object] = {
        "architectures": ["DFlashDraftModel" if markov is None else "DSparkDraftModel"],
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "block_size": num_drafts + 1 if markov is None else num_drafts,
        "dflash_config": block,
    }
    return _write(folder, tensors, described)


def random_pard(folder: Path, vocab_size: int, *, mask_id: int = 1, seed: int = 3) -> str:
    """Write a model that says it was trained to fill masks; return its folder."""
    tiny_llama(folder, vocab_size, seed, hidden_size=16, num_layers=1, context=64, sharpness=1.5)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": mask_id}))
    return str(folder)


def random_lookahead(target: str, folder: Path, num: int = 3, *, seed: int = 6) -> str:
    """Write look-ahead embeddings as far apart as a tiny model's own; return their folder."""
    width = AutoConfig.from_pretrained(target).hidden_size
    folder.mkdir(parents=True, exist_ok=True)
    embeddings = 0.7 * torch.randn(num, width, generator=torch.Generator().manual_seed(seed))
    save_file({"embeddings": embeddings}, folder / "model.safetensors")
    return str(folder)


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
