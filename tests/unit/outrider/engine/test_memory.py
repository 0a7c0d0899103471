"""What counts as free memory, and how many blocks a budget of it has."""

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine import memory
from outrider.engine.memory import MemoryBudget, SpareMemory
from outrider.wire.errors import ConfigError

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


def test_a_lock_that_is_not_released_is_waited_for_with_a_limit_and_logged(
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
