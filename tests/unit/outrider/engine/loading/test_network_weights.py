"""A network with its weights: ready to run, and quantised if asked for."""

import pytest
import torch

from outrider.engine.loading.loader import read_config
from outrider.engine.loading.network_weights import load_weights
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.quantization.quantize import Int8Linear
from outrider.wire.errors import ConfigError

CPU = torch.device("cpu")


def source_of(folder: str) -> WeightSource:
    return WeightSource.find(folder, read_config(folder), CPU, "none")


def test_a_network_is_in_eval_mode_without_gradients_and_searches_for_no_padding(original: str) -> None:
    network = load_weights(source_of(original), CPU, "bfloat16", "none", 1)
    assert not network.training and network.config.pad_token_id is None
    assert {(weight.dtype, weight.requires_grad) for weight in network.parameters()} == {(torch.bfloat16, False)}


def test_int8_quantises_every_linear_layer(original: str) -> None:
    network = load_weights(source_of(original), CPU, "float32", "int8", 1)
    assert sum(isinstance(module, Int8Linear) for module in network.modules()) == 2 * 7 + 1  # and the lm_head
    assert not any(isinstance(module, torch.nn.Linear) for module in network.modules())


def test_a_tensor_of_another_shape_is_named_with_both_shapes(original: str) -> None:
    source = source_of(original)
    source.config.vocab_size += 1
    with pytest.raises(ConfigError, match=r"lm_head\.weight of .* is \[300, (\d+)\], .* must be \[301, \1\]"):
        load_weights(source, CPU, "float32", "none", 1)
