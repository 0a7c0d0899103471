"""What counts as free memory, and how much of it a cache takes."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import memory
from outrider.engine.memory import MemoryBudget, SpareMemory
from outrider.wire.errors import ConfigError
from tests.forked import CONTEXT
from tests.native import skip_without_library
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.loading.tiny_models import load

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container on a machine with 8 GiB to give."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_available_bytes", lambda: 8 * GIB)
    return tmp_path


def write(cgroup: Path, **files: str) -> None:
    for name, text in files.items():
        (cgroup / f"memory.{name}").write_text(text + "\n")


def test_files_that_were_read_are_not_memory_in_use(cgroup: Path) -> None:
    """A container's `memory.current` counts the page cache, its own checkpoint among it."""
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nworkingset_refault_file 7"
    write(cgroup, max=str(4 * GIB), current=str(3 * GIB), stat=stat)
    assert memory.free_memory_bytes(CPU) == 4 * GIB - 3 * GIB + GIB + GIB // 2


def test_a_limit_of_cgroup_v1_counts_as_well(cgroup: Path) -> None:
    """There it is in a folder of its own, and `memory.stat` has what the groups below use under other names."""
    (cgroup / "memory").mkdir()
    stat = f"cache 7\ninactive_file 7\nactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB // 2}"
    write(cgroup / "memory", limit_in_bytes=str(4 * GIB), usage_in_bytes=str(3 * GIB), stat=stat)
    assert memory.free_memory_bytes(CPU) == 4 * GIB - 3 * GIB + GIB + GIB // 2


def test_workers_size_their_caches_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    order: list[str] = []
    entered = threading.Event()

    def other() -> None:
        with memory.hold_memory_lock():
            order.append("other")
            entered.set()

    with memory.hold_memory_lock():
        waiting = threading.Thread(target=other)
        waiting.start()
        assert not entered.wait(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "other"]


def test_without_a_place_for_the_lock_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", "/dev/null/cache")
    with memory.hold_memory_lock(), memory.hold_memory_lock():
        pass


def test_a_lock_that_is_not_let_go_is_waited_for_with_a_limit_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(memory, "LOCK_TIMEOUT_S", 0.15)
    caplog.set_level("INFO")
    with memory.hold_memory_lock(), memory.hold_memory_lock():
        pass
    lock = f"{tmp_path}/outrider-{os.getuid()}/memory.lock"
    assert caplog.messages == [
        f"waiting for another process of this user, which holds {lock}",
        f"{lock} was held for 0.15 s by another process of this user: going on without it",
    ]


@pytest.mark.parametrize("limit", ["max", str(64 * GIB), None])
def test_the_machine_gives_no_more_than_it_has(cgroup: Path, limit: str | None) -> None:
    if limit is not None:
        write(cgroup, max=limit, current=str(GIB))
    assert memory.free_memory_bytes(CPU) == 8 * GIB


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("original"), vocab_size=300)


@pytest.fixture
def folder(original: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


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


def test_a_cache_never_takes_what_a_step_needs() -> None:
    budget = MemoryBudget(weights_bytes=0, activations_bytes=300, free_bytes=1000)
    assert budget.num_blocks(block_bytes=100, num_wanted=50, fraction=1.0) == 7
    assert budget.num_blocks(block_bytes=100, num_wanted=50, fraction=0.5) == 5
    assert budget.num_blocks(block_bytes=100, num_wanted=3, fraction=0.5) == 3
    with pytest.raises(ConfigError, match="about 300 bytes for a step"):
        budget.num_blocks(block_bytes=701, num_wanted=50, fraction=1.0)
    assert replace(budget, graphs_bytes=200).num_blocks(block_bytes=100, num_wanted=50, fraction=0.9) == 5
    assert replace(budget, graphs_bytes=200, tap_bytes=7).spare(400) == SpareMemory(100, 7)
    assert budget.spare(800) == SpareMemory(), "a set size may leave nothing"


def test_the_masks_of_prompts_are_counted_with_a_step(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1 << 30)
    config = load(original).path._model.config
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
