"""A context is as long as the file means it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from outrider.engine.architectures.context import context_limit_of
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from tests.rounds import some_ids
from tests.tiny_models import random_model, save
from tests.unit.outrider.engine.files.folders import load

TOLERANCE = 1e-4
VOCAB = 300


def scaled(kind: str, factor: float | None = 4.0, length: int = 64, **more: Any) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, **more}
    return LlamaConfig(max_position_embeddings=length, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (scaled("linear"), 256),
        (scaled("yarn"), 256),
        (scaled("yarn", original_max_position_embeddings=64), 256),  # Qwen's, where somebody adds it
        (scaled("yarn", original_max_position_embeddings=16), 64),  # DeepSeek's: stretched already
        (scaled("yarn", original_max_position_embeddings=48), 192),  # Qwen 3's, with room for an answer in the stated
        (scaled("yarn", original_max_position_embeddings=256), 64),  # cut by hand
        (scaled("yarn", factor=None, original_max_position_embeddings=16), 64),
        (scaled("dynamic"), 64),
        (scaled("llama3", original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0), 64),
        (scaled("linear", factor=float("inf")), 64),
        (scaled("linear", factor=1e308), 64),
        (scaled("yarn", original_max_position_embeddings=10**400), 64),
        (Gemma3TextConfig(rope_scaling={"rope_type": "linear", "factor": 8.0}), 131072),  # of its full layers alone
    ],
)
def test_a_scaled_context_is_the_one_that_the_file_means(config: PreTrainedConfig, limit: int) -> None:
    assert context_limit_of(config, None) == limit
    with pytest.raises(ConfigError, match=f"context_limit is {limit + 1}, the model was made for {limit}"):
        context_limit_of(config, limit + 1)


def test_dynamic_scaling_is_refused_past_its_length_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\(max_position_embeddings 64, rope scaling dynamic by 4\): past that"):
        context_limit_of(scaled("dynamic"), 65)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_stretched_context_computes_what_transformers_does_without_a_cache(kind: str, tmp_path: Path) -> None:
    config = scaled(kind)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config.update({**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0})
    network = random_model(config, seed=3)
    runner = load(save(network, tmp_path))
    assert runner.facts.context_limit == 256
    ids = some_ids(200, VOCAB, 1)
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0]
    table = runner.pool.new_table()
    runner.forward([Row.of(table, ids[:90], 0, 1)])  # past the stated length from its cache
    found = runner.forward([Row.of(table, ids, 90, 110), Row.of(runner.pool.new_table(), ids[:20], 0, 1)])
    assert (found[:110] - expected[90:]).abs().max() < TOLERANCE
    assert (found[110] - expected[19]).abs().max() < TOLERANCE
