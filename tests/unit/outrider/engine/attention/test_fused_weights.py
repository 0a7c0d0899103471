"""What the fused path reads of a model before it packs a weight."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from outrider.engine.attention.fused_weights import FusedShape
from outrider.engine.errors import PathUnavailable
from outrider.engine.model_facts import ModelFacts
from tests.tiny_models import random_model

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FACTS = ModelFacts("m", 97, 128, "float32", "cpu", (0,), 1, num_lookahead=3)


def shape_of(config: PreTrainedConfig) -> FusedShape:
    model = random_model(config, seed=1)
    return FusedShape.of(model, model.model, FACTS)


def test_the_sizes_of_a_model() -> None:
    found = shape_of(LlamaConfig(**SIZES))
    assert (found.heads, found.kv_heads, found.head_size, found.context) == (4, 2, 16, 128)
    assert (found.vocab, found.lm_head_rows) == (100, 97), "look-ahead ids are fed and have no logits"
    assert found.attention_scale == pytest.approx(1 / 4) and found.windows == (0, 0) and not found.is_int8
    assert shape_of(MistralConfig(**SIZES, sliding_window=20)).windows == (20, 20)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_of_two_dtypes_are_refused(name: str) -> None:
    model = random_model(LlamaConfig(**SIZES), seed=1)
    weight = model.get_parameter(name)
    weight.data = weight.data.to(torch.bfloat16)
    with pytest.raises(PathUnavailable, match="whole weights of one dtype, or int8"):
        FusedShape.of(model, model.model, FACTS)
