"""Packed linear layers: the plain ones' results, no weight twice, and the plain ones wherever packing fails."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import UncachedModel
from outrider.engine.quantization import packed_linear
from outrider.engine.quantization.packed_linear import Operators, PackedLinear, operators, pack_linears, unpack_linears
from tests.rounds import largest_error, truth_of
from tests.tiny_models import random_model

VOCAB_SIZE = 512
DTYPES = [torch.float32, torch.bfloat16]


def llama(tied: bool = False) -> PreTrainedConfig:
    """As small as a model may be whose weights are still worth packing."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads, tie_word_embeddings=tied)


def gpt2() -> PreTrainedConfig:
    sizes = {"n_embd": 512, "n_layer": 1, "n_head": 4, "n_positions": 128}
    return GPT2Config(vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0, **sizes)


def logits(model: PreTrainedModel) -> Tensor:
    return UncachedModel(model).forward(range(3, 40))


def packed_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


@pytest.fixture(autouse=True)
def _needs_the_operators() -> None:
    if operators() is None:
        pytest.skip("this build of torch has no operators for packed weights")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [llama(), gpt2()], ids=["llama", "gpt2"])
def test_packed_layers_compute_the_same_and_come_back_as_they_were(
    config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("bfloat16 is packed only where the CPU has instructions for it (AVX-512)")
    model = random_model(config, seed=1).to(dtype)
    before, names = logits(model), [name for name, _ in model.named_parameters()]
    assert pack_linears(model) == len(packed_in(model)) >= 4
    tolerance = packed_linear.TOLERANCE[dtype]
    assert float((logits(model) - before).abs().max() / before.abs().max()) < tolerance
    unpack_linears(model)
    assert packed_in(model) == [] and [name for name, _ in model.named_parameters()] == names
    assert torch.equal(logits(model), before)


def test_no_weight_is_in_memory_twice() -> None:
    model = random_model(llama(), seed=1)
    mlp = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    pack_linears(model)
    gc.collect()
    assert mlp() is None


def test_a_tied_head_stays_plain() -> None:
    model = random_model(llama(tied=True), seed=1)
    before = logits(model)
    pack_linears(model)
    assert "lm_head" not in packed_in(model) and packed_in(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert float((logits(model) - before).abs().max()) < 1e-4


def wrong(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    found = operators()
    assert found is not None
    return found.apply(x, packed, *rest) * 1.001


def fails(*arguments: Any) -> Tensor:
    raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("broken", [{"apply": wrong}, {"apply": fails}, {"pack": fails}, None])
def test_an_operator_that_is_wrong_fails_or_is_missing_leaves_the_model_alone(
    broken: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = operators()
    assert found is not None
    changed = None if broken is None else Operators(**{"pack": found.pack, "apply": found.apply, **broken})
    model = random_model(llama(), seed=1)
    before = logits(model)
    monkeypatch.setattr(packed_linear, "operators", lambda: changed)
    assert pack_linears(model) == 0 and packed_in(model) == []
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("path", ["paged", "dense"])
def test_a_path_over_packed_layers_equals_the_plain_model(path: str) -> None:
    model = random_model(llama(), seed=1)
    truth = truth_of(random_model(llama(), seed=1))
    runner = choose_path(model, facts(), path, False)
    assert len(packed_in(model)) >= 4
    assert largest_error(runner, truth) < 1e-4


def facts() -> ModelFacts:
    return ModelFacts("packed", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
