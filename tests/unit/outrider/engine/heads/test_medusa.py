"""Medusa's and blockwise heads in every layout, against their formula in float64; faults of the files are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_loader import load_head
from outrider.engine.heads.kinds import MEDUSA, kind_of
from outrider.engine.heads.medusa import MedusaHeads, read_medusa
from outrider.engine.heads.network import UNMAPPED
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig, TargetConfig
from target_service.features.own_heads import load_own_heads
from tests.unit.outrider.engine.cuda.fake_cuda import fake_cuda
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, VOCAB, WIDTH

TOLERANCE = 1e-6
"""Largest difference, as a share of the largest logit: the heads run in float64, and their logits are float32."""
NUM_HEADS, NUM_LAYERS = 3, 2
LEGACY = {"medusa_num_heads": 2, "medusa_num_layers": 1}
"""As published: both counts are wrong."""
VLLM = {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": NUM_LAYERS, "hidden_size": WIDTH}


def random_tensors(rows: int = VOCAB) -> dict[str, Tensor]:
    """With vLLM's names."""
    generator = torch.Generator().manual_seed(2)
    made = {}
    for i in range(NUM_HEADS):
        for j in range(NUM_LAYERS):
            made[f"blocks.{i}.layers.{j}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) / 8
            made[f"blocks.{i}.layers.{j}.bias"] = torch.randn(WIDTH, generator=generator)
        made[f"lm_heads.{i}.weight"] = torch.randn(rows, WIDTH, generator=generator)
    return made


def legacy(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            renamed[f"{prefix}{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        else:
            renamed[f"{prefix}{parts[1]}.{NUM_LAYERS}.weight"] = tensor
    return renamed


def straight(tensors: dict[str, Tensor], projections: list[Tensor], hidden: Tensor) -> Tensor:
    """Return [N, heads, rows] of hidden [N, dt] float64."""
    rows = []
    for i in range(NUM_HEADS):
        x = hidden
        for j in range(NUM_LAYERS):
            weight, bias = tensors[f"blocks.{i}.layers.{j}.weight"], tensors.get(f"blocks.{i}.layers.{j}.bias")
            z = x @ weight.double().T + (0 if bias is None else bias.double())
            x = x + z / (1 + torch.exp(-z))
        rows.append(x @ projections[i].double().T)
    return torch.stack(rows, dim=1)


def without(tensors: dict[str, Tensor], word: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if word not in name}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return str(folder)


def logits_of(folder: str, target_folder: str, hidden: Tensor) -> Tensor:
    files = Checkpoint(folder, allow_pickle=True)
    assert kind_of(files) is MEDUSA
    found = read_medusa(files, TargetFiles(target_folder))
    assert found.projection.spec.taps == (NORMED,) and not found.projection.tensors
    doubles = {name: t.double() if t.is_floating_point() else t for name, t in found.tensors.items()}
    return MedusaHeads.of(found.facts, doubles)(hidden)


def own(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[f"lm_heads.{i}.weight"] for i in range(NUM_HEADS)]


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "the repository's": (LEGACY, legacy, "medusa_lm_head.pt"),
    "the repository's, safe": ({}, legacy, "medusa_lm_head.safetensors"),
    "a prefix": (LEGACY, lambda t: legacy(t, "medusa_lm_head."), "model.safetensors"),
    "beside a base model": (
        LEGACY,
        lambda t: {**legacy(t, "medusa_head."), "lm_head.weight": torch.ones(VOCAB, WIDTH)},
        "model.safetensors",
    ),
    "vLLM's": (VLLM, dict, "model.safetensors"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_compute_their_formula_in_every_layout(name: str, target_folder: str, tmp_path: Path) -> None:
    config, rename, file = LAYOUTS[name]
    tensors, hidden = random_tensors(), torch.randn(5, WIDTH, dtype=torch.float64)
    logits = logits_of(write(tmp_path, config, rename(tensors), file), target_folder, hidden)
    truth = straight(tensors, own(tensors), hidden)
    assert logits.shape == (5, NUM_HEADS, VOCAB)
    assert (logits - truth).abs().max() < TOLERANCE * truth.abs().max()


def test_blockwise_heads_share_the_targets_projection(target_folder: str, tmp_path: Path) -> None:
    """And so do heads with one projection of their own, which vLLM calls original_lm_head."""
    tensors, hidden = random_tensors(), torch.randn(4, WIDTH, dtype=torch.float64)
    blocks = without(tensors, "lm_heads")
    lent = load_file(Path(target_folder) / "model.safetensors")["lm_head.weight"]
    logits = logits_of(write(tmp_path, LEGACY, legacy(blocks)), target_folder, hidden)
    truth = straight(tensors, [lent] * NUM_HEADS, hidden)
    assert (logits - truth).abs().max() < TOLERANCE * truth.abs().max()
    shared = {**blocks, "lm_head.weight": tensors["lm_heads.1.weight"]}
    logits = logits_of(write(tmp_path, {**VLLM, "original_lm_head": True}, shared), target_folder, hidden)
    truth = straight(tensors, [tensors["lm_heads.1.weight"]] * NUM_HEADS, hidden)
    assert (logits - truth).abs().max() < TOLERANCE * truth.abs().max()


@pytest.mark.parametrize("whole", [False, True])
def test_a_token_map_leaves_the_other_ids_without_a_row(whole: bool, target_folder: str, tmp_path: Path) -> None:
    """vLLM's: the projections have the map's rows, or all, of which the map's are taken; biases are off there."""
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB]
    tensors = without(random_tensors(VOCAB if whole else DRAFT_VOCAB), "bias")
    hidden = torch.randn(3, WIDTH, dtype=torch.float64)
    config = {**VLLM, "truncated_vocab_size": DRAFT_VOCAB, "logit_scale": 0.5}
    logits = logits_of(write(tmp_path, config, {**tensors, "token_map": kept}), target_folder, hidden)
    rows = [weight[kept] if whole else weight for weight in own(tensors)]
    truth = 0.5 * straight(tensors, rows, hidden)
    assert (logits[..., kept] - truth).abs().max() < TOLERANCE * truth.abs().max()
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, kept, False)
    assert (logits[..., others] == UNMAPPED).all()


def test_loaded_heads_are_ready_to_run(target_folder: str, tmp_path: Path) -> None:
    tensors, hidden = random_tensors(), torch.randn(2, WIDTH).bfloat16()
    config = DraftConfig(model=write(tmp_path, VLLM, tensors), device="cpu", context_limit=64)
    loaded = load_head(config, target_folder, MEDUSA)
    assert (loaded.facts.vocab_size, loaded.facts.context_limit, loaded.facts.dtype) == (VOCAB, 64, "float32")
    truth = straight(tensors, own(tensors), hidden.double())
    with torch.inference_mode():
        assert (loaded.network(hidden) - truth).abs().max() < 1e-5 * truth.abs().max()


def test_hidden_states_go_to_the_device_and_dtype_of_the_heads(target_folder: str, tmp_path: Path) -> None:
    """They come over the wire, and so on the CPU."""
    read = read_medusa(Checkpoint(write(tmp_path, VLLM, random_tensors())), TargetFiles(target_folder))
    with fake_cuda():
        heads = MedusaHeads.of(read.facts, {name: tensor.to("cuda") for name, tensor in read.tensors.items()})
        logits = heads(torch.randn(2, WIDTH).bfloat16())
        assert (logits.device.type, logits.shape) == ("cuda", (2, NUM_HEADS, VOCAB))


def test_heads_of_the_target_that_are_not_there_are_named_by_their_setting() -> None:
    runner: Any = SimpleNamespace(features_refusal=None)
    config = TargetConfig(model="models/demo/target", heads="./nowhere")
    with pytest.raises(ConfigError, match=r"^heads are \./nowhere: model is '\./nowhere', and there is no such folder"):
        load_own_heads(config, runner, b"", runner)
