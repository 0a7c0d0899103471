"""Checkpoints that are quantised already: served where transformers reads them, refused by name where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.tiny_models import tiny_llama, write_tokenizer

VOCABULARY = 300


def load(model: str, **changes: Any) -> ModelRunner:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_slots": 2, "context_limit": None}
    return load_runner(TargetConfig(model=model, kv_cache_tokens=None, **options | changes))


@pytest.fixture
def whole(tmp_path: Path) -> str:
    return tiny_llama(tmp_path / "whole", vocab_size=VOCABULARY)


@pytest.fixture
def by_torchao(whole: str, tmp_path: Path) -> str:
    """As transformers saves it, in safetensors."""
    quantization = pytest.importorskip("torchao.quantization", reason="pip install 'outrider[quant]'")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(whole, quantization_config=config, dtype=torch.float32)
    folder = tmp_path / "torchao"
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return str(folder)


def test_torchao_weights_are_served_as_they_are(by_torchao: str, whole: str) -> None:
    runner = load(by_torchao)
    assert runner.facts.quantization == "torchao" and runner.path.name in ("paged", "dense")
    ids = list(range(40, 80))
    table = runner.pool.new_table()
    found = runner.forward([Row.of(table, ids, 0, len(ids))])  # [T, V]
    own = AutoModelForCausalLM.from_pretrained(by_torchao, dtype=torch.float32)
    assert torch.allclose(found, UncachedModel(own).forward(ids), atol=1e-3)
    rounded_from = UncachedModel(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)).forward(ids)
    assert 0 < float((found - rounded_from).abs().max()) < 0.1 * float(rounded_from.abs().max())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "aqlm"}, r"quantised by aqlm, .* cpu: .*aqlm"),
        ({"quant_method": "hqq"}, r"quantised by hqq, .* cpu: .*hqq"),
        ({"quant_method": "magic"}, r"quantised by magic, .* cpu: .*magic"),
    ],
)
def test_a_method_that_cannot_be_read_here_is_refused_by_name(
    whole: str, declared: dict[str, object], message: str
) -> None:
    declare(whole, declared)
    with pytest.raises(ConfigError, match=message + ".*use a checkpoint that is not quantised"):
        load(whole)


def test_it_is_not_rounded_a_second_time(whole: str) -> None:
    declare(whole, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantization is .int8. and the weights of .* are quantised by gptq"):
        load(whole, quantization="int8")


def declare(model: str, quantization: dict[str, object]) -> None:
    path = Path(model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
