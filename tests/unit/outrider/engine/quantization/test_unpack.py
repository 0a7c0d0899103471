"""Quantised checkpoints on a device without kernels for them: unpacked at load, to the numbers that they stand for."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.quantization import packed_layouts as layouts
from outrider.engine.quantization.unpack import PackedCheckpoint
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.packed import FORMATS, pack_folder
from tests.tiny_models import tiny_llama

IDS = list(range(40, 60))


def load(folder: Path, **changes: Any) -> ModelRunner:
    return load_runner(TargetConfig(model=str(folder), device="cpu", dtype="float32", max_slots=1, **changes))


def logits(runner: ModelRunner) -> torch.Tensor:
    table = runner.pool.new_table()
    return runner.forward([Row.of(table, IDS, 0, len(IDS))])  # [T, V]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_llama(tmp_path_factory.mktemp("whole"), vocab_size=300, num_layers=1, hidden_size=64))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "packed"))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_unpacked_to_the_numbers_it_stands_for(name: str, folder: Path) -> None:
    expected = pack_folder(folder, name)
    found = PackedCheckpoint.read(str(folder), FORMATS[name][0])
    assert found.names == expected.keys()
    for name, tensor in found.state(torch.float32).items():
        assert torch.allclose(tensor[...], expected[name], rtol=1e-6, atol=0), name


def test_a_block_that_is_wider_than_the_weight_takes_no_memory() -> None:
    numbers, huge = torch.arange(8.0).reshape(2, 4), 1 << 50
    parts = {"weight": numbers, "scale": torch.tensor([[2.0, 4.0]])}
    expected = numbers * torch.tensor([2.0, 2.0, 4.0, 4.0])
    assert torch.equal(layouts.scaled(parts, block=(huge, 2)), expected)
    state = {"blocksize": huge, "nested_blocksize": huge, "nested_offset": 0.0, "shape": [2, 4]}
    parts = {
        "state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        "weight": torch.tensor([[0x01], [0x23], [0x45], [0x67]], dtype=torch.uint8),
        "map": torch.arange(16.0),
        "absmax": torch.zeros(1, dtype=torch.uint8),
        "nested_absmax": torch.tensor([2.0]),
        "nested_map": torch.ones(256),
    }
    assert torch.equal(layouts.bits_and_bytes4(parts), 2 * numbers)


SERVED = [name if name == "fp8 blocks" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]


@pytest.mark.parametrize("name", SERVED)
def test_its_logits_are_those_of_the_unpacked_weights(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded_from = UncachedModel(original).forward(IDS)
    original.load_state_dict(pack_folder(folder, name), strict=False)
    expected = UncachedModel(original).forward(IDS)
    with caplog.at_level(logging.INFO, "outrider.engine.quantization.quantize"):
        runner = load(folder)
    assert torch.allclose(logits(runner), expected, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(rounded_from, expected, atol=1e-4 * float(expected.abs().max()))
    method = FORMATS[name][0]["quant_method"]
    assert f"unpacked to float32, 294.8 KiB: they are quantised by {method}" in caplog.text
    assert runner.facts.quantization == "none"


def test_the_settings_may_refuse_to_unpack(folder: Path) -> None:
    pack_folder(folder, "gptq")
    with pytest.raises(
        ConfigError, match=r"unpack_weights is false, and the weights of .* quantised by gptq: .*optimum"
    ):
        load(folder, unpack_weights=False)


@pytest.mark.parametrize(
    ("name", "missing", "what"),
    [
        ("fp8 tensor", "weight_scale", "stored as F8_E4M3 without a scale beside it"),
        ("int8", "weight_scale", "stored as I8 without a scale beside it"),
        ("bnb8", "SCB", "stored as I8 without a scale beside it"),
        ("nvfp4", "weight_global_scale", "NVFP4 without a scale for all of it"),
        ("nvfp4 modelopt", "weight_scale_2", "NVFP4 without a scale for all of it"),
    ],
)
def test_numbers_without_their_scale_are_no_weights(name: str, missing: str, what: str, folder: Path) -> None:
    pack_folder(folder, name)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{missing}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"up_proj.weight.* of .* is {what}, which cannot be unpacked here"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {"bits": 5}, r"qweight of .* is GPTQ of 5 bits, which cannot be unpacked here"),
        ("awq", {"version": "gemv"}, r"qweight of .* is AWQ of 4 bits, version gemv, which cannot be unpacked here"),
        ("gptq 8", {"bits": 4}, r"proj.weight of .* is \[64, 256\] when unpacked, and by its config.json must be"),
        ("fp8 blocks", {"weight_block_size": [8, 8]}, r"proj.weight cannot be unpacked .* in blocks of 8 x 8"),
    ],
)
def test_what_is_not_as_declared_is_refused(name: str, change: dict[str, Any], message: str, folder: Path) -> None:
    pack_folder(folder, name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(folder)
