"""Compiling the C++ forward: once for a machine, safe beside another worker, and no reason to refuse a model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.loading.loader import load_runner
from outrider.engine.native import build, library
from outrider.engine.native.build import BuildError
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.native import skip_without_library
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.cuda.cuda_pair import Pair

LOAD = "from outrider.engine.native.library import library; library(); print('loaded')"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has loaded no library yet."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    library.library.cache_clear()
    yield tmp_path / "cache"
    library.library.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("llama"), 97)


def path_name(model: str, attention_path: str = "auto") -> str:
    runner = load_runner(
        TargetConfig(
            model=model,
            device="cpu",
            dtype="float32",
            kv_cache_tokens=256,
            max_slots=2,
            context_limit=None,
            attention_path=attention_path,
        )
    )
    return runner.path.name


def files(folder: Path) -> list[str]:
    return [path.suffix for path in folder.iterdir()]


def test_without_a_compiler_or_a_cache_the_next_path_serves_with_a_warning(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.touch()  # no folder can be made there
    library.load_at_start()
    assert path_name(model) != "fused"
    assert f"cannot build in {cache}" in caplog.text
    assert "set OUTRIDER_CACHE_DIR to a folder that can be" in caplog.text
    cache.unlink()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler: /nowhere/c\\+\\+ not found"):
        path_name(model, "fused")


def test_a_worker_whose_model_runs_on_another_path_makes_its_noise_with_the_library(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker on a GPU is: the fused path alone used to load it."""
    skip_without_library()
    library.library.cache_clear()
    settings = {"device": "cpu", "attention_path": "dense", "max_slots": 2, "kv_cache_tokens": 256}
    pair = Pair(monkeypatch, model, model, **settings)
    assert pair.target.base.loaded.runner.path.name == "dense" and library.loaded() is not None


@pytest.mark.parametrize(("function", "result"), [("outrider_new", None), ("outrider_pack", -1)])
def test_without_memory_or_threads_for_it_the_next_path_serves(
    model: str, monkeypatch: pytest.MonkeyPatch, function: str, result: int | None
) -> None:
    """What the library returns when the machine refuses either, be it at the start or amid the weights."""
    monkeypatch.setattr(library.library(), function, lambda *_: result)
    assert path_name(model) == "paged"
    with pytest.raises(ConfigError, match="fused: no memory"):
        path_name(model, "fused")


@pytest.mark.slow
def test_two_workers_build_a_broken_file_again_and_a_third_needs_no_compiler(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compile_to", lambda path, _: (cache.mkdir(), path.write_bytes(b"not a library")))
    broken = build.built_library()
    abandoned, under_way = cache / "abandoned.so.part", cache / "under-way.so.part"
    abandoned.touch()
    under_way.touch()
    os.utime(abandoned, (0, 0))
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(cache))
    assert build.built_library() == broken, "the file is there, so nothing was compiled"
    workers = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        out, error = worker.communicate(timeout=110)
        assert (worker.returncode, out.strip()) == (0, "loaded"), error
    assert under_way.exists() and not abandoned.exists()
    under_way.unlink()
    assert broken.stat().st_size > 10_000 and files(cache) == [".so"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert path_name(model, "fused") == "fused"


@pytest.mark.parametrize(("mode", "why"), [(0o755, "another account"), (0o775, "written by other")])
def test_a_library_that_another_account_may_have_written_is_built_again_or_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int, why: str
) -> None:
    monkeypatch.setattr(build, "compile_to", lambda path, _: (cache.mkdir(), path.write_bytes(b"another's code")))
    path = build.built_library()
    path.chmod(mode)
    if mode == 0o755 and os.getuid() == 0:
        os.chown(path, 1, 1)  # root's own are loaded by everybody
    elif mode == 0o755:
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(BuildError, match=why):
        build.check_owner(path)
    built = list[Path]()
    monkeypatch.setattr(library, "compile_to", lambda path, _: built.append(path))
    monkeypatch.setattr(library.ctypes, "CDLL", lambda _: pytest.fail("it was loaded"))
    with pytest.raises(BuildError, match=why):
        library.library()
    assert built == [path]
