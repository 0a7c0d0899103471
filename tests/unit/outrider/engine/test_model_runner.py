"""The runner over each path of transformers' modules: pieces, forks, stale blocks and refusals.

Ragged rounds on every architecture are in test_architectures.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest
from outrider.wire.settings.config import TargetConfig
from tests import rounds
from tests.rounds import Fed, step
from tests.tiny_models import tiny_llama

TOLERANCE = 1e-4
"""Largest logit difference, float32."""
VOCAB_SIZE = 97


def load(folder: str, path: str) -> ModelRunner:
    settings: dict[str, Any] = {"kv_cache_tokens": 2048, "max_slots": 8, "attention_path": path}
    return load_runner(TargetConfig(model=folder, device="cpu", **settings))


@lru_cache(maxsize=1)
def uncached_of(folder: str) -> UncachedModel:
    return UncachedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def uncached(runner: ModelRunner) -> Callable[[list[int]], Tensor]:
    """[T, V] from transformers alone."""
    return uncached_of(runner.facts.model_id).forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("llama"), VOCAB_SIZE)


@pytest.fixture(scope="module", params=["paged", "dense"])
def llama(folder: str, request: pytest.FixtureRequest) -> ModelRunner:
    return load(folder, request.param)


def some_ids(count: int, seed: int) -> list[int]:
    return rounds.some_ids(count, VOCAB_SIZE, seed)


def test_nothing_stale_is_read(llama: ModelRunner) -> None:
    """NaN in every block that nobody owns: a padding column that read one would spread it."""
    long, short = (Fed(llama, uncached(llama), some_ids(60, seed)) for seed in (1, 2))
    step(llama, [(long, 33, 0), (short, 18, 0)])
    owned = {*long.table.blocks, *short.table.blocks, 0}
    free = [block for block in range(llama.pool.num_blocks + 1) if block not in owned]
    with torch.inference_mode():  # the storage was made in it
        path: Any = llama.path
        for layer in path._cache.layers:
            layer.keys[free], layer.values[free] = torch.nan, torch.nan
    assert step(llama, [(long, 39, 6), (short, 19, 1)]) < TOLERANCE
    long.table.free()
    short.table.free()


@pytest.mark.parametrize("bad_id", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_changes_nothing(llama: ModelRunner, bad_id: int) -> None:
    good, bad = llama.pool.new_table(), llama.pool.new_table()
    llama.forward([Row.of(good, [1, 2], 0, 0)])
    with pytest.raises(InvalidRequest, match=f"token id {bad_id} is outside the vocabulary, 0 to 96"):
        llama.forward([Row.of(good, [1, 2, 3], 2, 1), Row.of(bad, [4, bad_id, 5], 0, 1)])
    assert (good.num_tokens, bad.num_tokens, len(bad.blocks)) == (2, 0, 0)
    good.free()
