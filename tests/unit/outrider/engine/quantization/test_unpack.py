"""Checkpoints that are quantised already: served as they are or unpacked at load, or refused by name."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TorchAoConfig

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.quantization.unpack import PackedCheckpoint
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.packed import FORMATS, pack_folder
from tests.tiny_models import tiny_llama, write_tokenizer
from tests.unit.outrider.engine.files.folders import change

IDS, VOCAB_SIZE = list(range(40, 60)), 300


def load(folder: Path, **changes: Any) -> ModelRunner:
    return load_runner(TargetConfig(model=str(folder), device="cpu", dtype="float32", max_slots=1, **changes))


def logits(runner: ModelRunner) -> torch.Tensor:
    table = runner.pool.new_table()
    return runner.forward([Row.of(table, IDS, 0, len(IDS))])  # [T, V]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_llama(tmp_path_factory.mktemp("whole"), vocab_size=VOCAB_SIZE, num_layers=1, hidden_size=64))


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
    ("name", "declared", "message"),
    [
        ("gptq", {"bits": 5}, r"qweight of .* is GPTQ of 5 bits, which cannot be unpacked here"),
        ("awq", {"version": "gemv"}, r"qweight of .* is AWQ of 4 bits, version gemv, which cannot be unpacked here"),
        ("gptq 8", {"bits": 4}, r"proj.weight of .* is \[64, 256\] when unpacked, and by its config.json must be"),
        ("fp8 blocks", {"weight_block_size": [8, 8]}, r"proj.weight cannot be unpacked .* in blocks of 8 x 8"),
    ],
)
def test_what_is_not_as_declared_is_refused(name: str, declared: dict[str, Any], message: str, folder: Path) -> None:
    pack_folder(folder, name)
    config = json.loads((folder / "config.json").read_text())
    change(folder / "config.json", quantization_config=config["quantization_config"] | declared)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.fixture
def by_torchao(whole: Path, tmp_path: Path) -> Path:
    """As transformers saves it, in safetensors."""
    quantization = pytest.importorskip("torchao.quantization", reason="pip install 'outrider[quant]'")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(whole, quantization_config=config, dtype=torch.float32)
    folder = tmp_path / "torchao"
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder


def test_torchao_weights_are_served_as_they_are(by_torchao: Path, whole: Path) -> None:
    runner = load(by_torchao)
    assert runner.facts.quantization == "torchao" and runner.path.name in ("paged", "dense")
    found = logits(runner)
    own, rounded_from = (
        UncachedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).forward(IDS)
        for folder in (by_torchao, whole)
    )
    assert torch.allclose(found, own, atol=1e-3)
    assert 0 < float((found - rounded_from).abs().max()) < 0.1 * float(rounded_from.abs().max())


@pytest.mark.parametrize("method", ["aqlm", "hqq", "magic"])
def test_a_method_that_cannot_be_read_here_is_refused_by_name(folder: Path, method: str) -> None:
    change(folder / "config.json", quantization_config={"quant_method": method})
    message = f"quantised by {method}, .* cpu: .*{method}.*use a checkpoint that is not quantised"
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_it_is_not_rounded_a_second_time(folder: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantization is .int8. and the weights of .* are quantised by gptq"):
        load(folder, quantization="int8")
