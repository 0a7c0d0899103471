"""The paged path: plans, what each kind of attention needs, mixed widths, and rows that do not see one another."""

from pathlib import Path

import pytest
from torch import Tensor
from transformers import CONFIG_MAPPING

from outrider.engine.loading.loader import load_runner
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig
from tests.rounds import some_ids
from tests.tiny_models import random_model, save
from tests.zoo import SHAPE

VOCAB_SIZE = 97
TOLERANCE = 1e-4


@pytest.mark.parametrize("path", ["paged", "dense"])
def test_long_and_short_rows_have_one_set_of_rotary_factors(path: str, tmp_path: Path) -> None:
    """LongRoPE: a row of 20 tokens is the same alone and beside one that is past the length of pretraining."""
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {**long, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = CONFIG_MAPPING["phi3"](**SHAPE, rope_parameters=rope, original_max_position_embeddings=32)
    folder = save(random_model(config, seed=3), tmp_path)
    options = {"device": "cpu", "dtype": "auto", "kv_cache_tokens": 1024, "max_slots": 2, "attention_path": path}

    def short_logits(context_limit: int, *, beside: int) -> Tensor:
        runner = load_runner(TargetConfig(model=folder, context_limit=context_limit, **options))
        ids = [some_ids(20, VOCAB_SIZE, 1), some_ids(beside, VOCAB_SIZE, 2)]
        return runner.forward([Row.of(runner.pool.new_table(), some, 0, 1) for some in ids if some])[0]

    alone, beside_long = short_logits(128, beside=0), short_logits(128, beside=100)
    assert (alone - beside_long).abs().max() < TOLERANCE
    assert (alone - short_logits(32, beside=0)).abs().max() > 1e-2  # the short factors, where nothing is long
