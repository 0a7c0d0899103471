"""A path whose logits are wrong serves nothing."""

from typing import Any

import pytest
import torch

from outrider.engine.attention.dense import DenseLayer
from outrider.engine.model_runner import ModelRunner
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.loading.tiny_models import load


def test_memory_that_runs_out_in_the_self_test_is_not_the_paths_fault(
    original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: ModelRunner, rows: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "forward", out_of_memory)
    with pytest.raises(ConfigError, match="cpu has too little memory for"):
        load(original, attention_path="auto")


def test_the_self_test_refuses_wrong_logits(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV read one column off gives nonsense without any error."""
    right = DenseLayer.write_and_read
    monkeypatch.setattr(DenseLayer, "write_and_read", lambda *arguments: right(*arguments).roll(1, dims=2))
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM .*dense: computes other logits .* largest difference \d\.\d\de"
    ):
        load(original)
