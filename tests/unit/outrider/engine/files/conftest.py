"""Fixtures of the tests beside."""

import shutil
from pathlib import Path

import pytest

from tests.gguf_models import write_gguf
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=300)


@pytest.fixture
def folder(llama: str, tmp_path: Path) -> Path:
    """A copy of the Llama that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("whole"), vocab_size=300)


@pytest.fixture(scope="module")
def file(plain: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_gguf(plain, tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")
