"""Weights go where they are used."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.loading.tiny_models import load


def test_weights_go_straight_to_a_gpu_that_is_large_enough(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def from_pretrained(model: str, **options: Any) -> None:
        asked.append(options)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB\nsecond line")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    message = r"cuda:0 has too little memory for .* allocate 4.00 GiB; .* lower its gpu_memory_utilization or kv_cache"
    with pytest.raises(ConfigError, match=message):
        load(original, device="cuda")
    assert asked[0]["device_map"] == {"": torch.device("cuda", 0)}


def test_int8_on_a_gpu_is_refused_with_the_remedy(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"quantization is 'int8' and the device cuda:0: .* quantised for GPUs") as e:
        load(original, device="cuda", quantization="int8")
    assert e.value.param == "quantization"
