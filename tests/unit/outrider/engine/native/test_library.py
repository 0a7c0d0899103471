"""Without the compiled forward the next path serves."""

from pathlib import Path

import pytest

from outrider.engine.native import library
from outrider.wire.errors import ConfigError
from tests.native import skip_without_library
from tests.unit.outrider.engine.cuda.cuda_pair import Pair
from tests.unit.outrider.engine.native.served import path_name


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
