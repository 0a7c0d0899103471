"""A widened model says what the model said, and what cannot be widened is refused by its size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from outrider.lab.models.widening import WidenedSizes, WideningError, check, largest_difference, widen, widen_folder
from tests.tiny_models import tiny_llama

SIZES = WidenedSizes(hidden=64, intermediate=96, heads=8, kv_heads=4, extra_layers=1)
"""Of a model of 32, 64, 4 and 2, with 2 layers."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_llama(tmp_path_factory.mktemp("narrow")))


@pytest.fixture(scope="module")
def model(source: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, kv_heads=2)], ids=["as many to a KV head", "more"])
def test_a_widened_model_has_the_same_logits(model: LlamaForCausalLM, sizes: WidenedSizes) -> None:
    wide = widen(model, sizes)
    assert wide.config.num_hidden_layers == 3 and wide.lm_head.weight.shape == (320, 64)
    assert largest_difference(model, wide) < 1e-4
    assert wide.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps / 2)  # of a mean with as many zeros
    with torch.no_grad():
        wide.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert largest_difference(model, wide) > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 16}, "hidden is 16, must be at least the model's own 32"),
        ({"extra_layers": -1}, "extra_layers is -1, must be at least the model's own 0"),
        ({"kv_heads": 3}, "heads is 8, must be a multiple of kv_heads, 3"),
        ({"hidden": 60}, "hidden is 60, must be a multiple of heads, 8"),
        ({"kv_heads": 8}, "heads / kv_heads is 1, must be at least the model's own 2"),
    ],
)
def test_a_size_that_cannot_be_is_named(model: LlamaForCausalLM, changes: dict[str, int], message: str) -> None:
    with pytest.raises(WideningError, match=message):
        check(model, replace(SIZES, **changes))


def test_another_model_is_refused_and_widening_returns_a_summary(source: Path, tmp_path: Path) -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(WideningError, match="the model is a GPT2LMHeadModel"):
        check(other, SIZES)
    with pytest.raises(WideningError, match=r"config\.json is missing"):
        widen_folder(tmp_path, tmp_path / "wide", SIZES)
    assert "M parameters, largest logit difference " in widen_folder(source, tmp_path / "wide", SIZES)
    assert (tmp_path / "wide" / "tokenizer.json").is_file()
