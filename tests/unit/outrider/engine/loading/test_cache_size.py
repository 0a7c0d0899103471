"""How much of the free memory a loaded model's cache takes, and when."""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.engine import memory
from outrider.wire.errors import ConfigError
from tests.forked import CONTEXT
from tests.native import skip_without_library
from tests.unit.outrider.engine.loading.tiny_models import load


def test_the_cache_takes_its_fraction_of_the_free_memory(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head width, float32
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1000 * block_bytes)
    assert load(original, kv_cache_fraction=0.01).pool.num_blocks == 10
    assert load(original, kv_cache_fraction=0.02).pool.num_blocks == 20
    assert load(original).pool.num_blocks == 2 * 16  # both slots' contexts, and no more
    assert load(original, max_slots=64).pool.num_blocks == 100  # a tenth
    monkeypatch.setattr("outrider.engine.loading.cache_size.ANSWER_TOKENS", 64)
    assert load(original, max_slots=3).pool.num_blocks == 16  # one context at least
    assert load(original, max_slots=8).pool.num_blocks == 8 * 4
    with pytest.raises(ConfigError, match=rf"a block takes {block_bytes} bytes, .*kv_cache_fraction 0\.0001"):
        load(original, kv_cache_fraction=0.0001)


def test_the_masks_of_prompts_are_counted_with_a_step(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1 << 30)
    path: Any = load(original).path
    config = path._model.config
    num_shared = config.num_attention_heads // config.num_key_value_heads
    num_bytes = memory.masks_bytes([(None, None)], 4 * num_shared, 100, 256)
    assert num_bytes == 100 * 256 * (4 * num_shared + 1)
    assert memory.masks_bytes([(None, None), (16, None)], 2, 100, 256) == 100 * 256 * 3 + 100 * 116 * 2
    settings: dict[str, Any] = {"attention_path": "paged", "max_prefill_tokens": 100}
    counted = load(original, **settings).spare.num_bytes
    monkeypatch.setattr(memory, "masks_bytes", lambda *_: 0)
    assert load(original, **settings).spare.num_bytes - counted == num_bytes


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_a_cache_on_a_cpu_takes_memory_as_it_is_used(original: str, path: str) -> None:
    if path == "fused":
        skip_without_library()
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:  # this one may have memory to use again
        grown, asked = pool.submit(cache_growth, original, path).result(60)
    assert grown < 0.1 * asked and asked > 50e6


def test_a_cache_larger_than_the_free_memory_is_refused(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 20 * block_bytes)
    assert load(original, kv_cache_tokens=320).pool.num_blocks == 20
    with pytest.raises(ConfigError, match=r"kv_cache_tokens is 321, .*; lower it to at most 320") as caught:
        load(original, kv_cache_tokens=321)
    assert caught.value.param == "kv_cache_tokens"


def cache_growth(folder: str, path: str) -> tuple[int, int]:
    """-> bytes by which this process has grown with a cache, and the cache's."""
    load(folder, attention_path=path)  # what a first load brings along is not the cache's
    before = resident_bytes()
    runner = load(folder, attention_path=path, kv_cache_tokens=1 << 18)
    return resident_bytes() - before, (1 << 18) * runner.kv_bytes_per_token


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
