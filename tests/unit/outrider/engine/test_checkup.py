"""What is wrong with devices and models, planted, and the remedy beside it."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from outrider.engine import checkup
from outrider.engine.model_check import CheckTask
from tests.forked import REPO
from tests.stack import DEMO_DRAFT, DEMO_TARGET
from tests.unit.outrider.engine.checked import pair


def test_a_gpu_that_torch_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (found 11040).", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    monkeypatch.setattr(checkup, "GPU_DEVICE", Path("/no/such/device"))
    assert checkup.check_gpu() == ("ok", "none; workers run on the CPU", "")
    monkeypatch.setattr(checkup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    state, found, remedy = checkup.check_gpu()
    assert state == "problem" and "was built for CPUs" in found and "--index-url" in remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    state, found, remedy = checkup.check_gpu()
    assert state == "problem" and "driver on your system is too old" in found and "for CUDA 12.8" in remedy


def test_a_gpu_whose_torch_is_too_old_for_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for version, state in (("2.11.0+cu130", "warning"), ("2.12.1", "warning"), ("2.13.0", "ok"), ("2.14.0a0", "ok")):
        monkeypatch.setattr(torch, "__version__", version)
        found = checkup.check_gpu()
        assert found[0] == state and "1 x H100" in found[1]
        assert ("no path flash, and so no CUDA graphs" in found[1]) is (state == "warning")


@pytest.mark.parametrize(("weights", "state"), [(16, "ok"), (60, "ok"), (75, "problem")])
def test_both_models_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch, weights: int, state: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    models = [checkup.Footprint(size << 30, 1 << 30) for size in (weights, 2)]
    found = checkup.check_memory(models, "cuda")
    assert found[0] == state and "on one GPU they share it, gpu_memory_utilization in order: " in found[1]
    if weights == 16:
        assert found[1].endswith("58.3 GiB (0.729), 13.0 GiB (0.162)")


def test_no_compiler_and_no_place_for_what_it_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    state, found, _ = checkup.check_native()
    assert state == "ok" and f"compiles it at the first start, half a minute, into {tmp_path}" in found
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
        state, found, _ = checkup.check_native()
    assert state == "warning"
    assert f"{tmp_path} cannot be written; set OUTRIDER_CACHE_DIR to a folder that can be" in found
    monkeypatch.setenv("CXX", "no-such-compiler")
    state, found, remedy = checkup.check_native()
    assert state == "warning" and "no C++ compiler: no-such-compiler not found" in found and "slowly" in remedy


def test_a_device_that_is_not_there_is_a_finding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = dict(checkup.findings(CheckTask(DEMO_TARGET, [DEMO_DRAFT], "cuda", "bfloat16")))
    assert found["device"][:2] == ("problem", "device is 'cuda', this process sees 0 CUDA devices; use cpu")
    assert found["target"][0] == found[f"draft {DEMO_DRAFT}"][0] == "ok"
    assert "memory" not in found and found["skipped"][1].startswith("memory")


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "problem"), (50 << 20, "warning"), (1 << 30, "ok")])
def test_memory_that_is_too_small_for_a_pair(monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    monkeypatch.setattr(checkup.memory, "free_memory_bytes", lambda device: free)
    said = pair(DEMO_DRAFT)["memory"]
    assert said[0] == state and "45.5 MiB of weights, 14.0 MiB for a full context of each model" in said[1]


def test_the_memory_of_each_draft_is_counted_by_itself_and_that_of_heads_too() -> None:
    eagle, medusa = str(REPO / "models/demo/eagle3"), str(REPO / "models/demo/medusa")
    assert pair()["memory"][1].startswith("42.0 MiB of weights, 12.0 MiB for a full context")
    said = pair(DEMO_DRAFT, eagle, medusa)
    for draft, found in (
        (DEMO_DRAFT, "45.5 MiB of weights, 14.0 MiB"),
        (eagle, "47.2 MiB of weights, 13.0 MiB"),
        (medusa, "50.3 MiB of weights, 12.0 MiB"),
    ):
        assert said[f"memory with {draft}"][1].startswith(found)
