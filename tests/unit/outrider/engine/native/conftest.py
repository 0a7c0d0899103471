"""Fixtures of the tests beside."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.native import library
from tests.tiny_models import tiny_llama


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
