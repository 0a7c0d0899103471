"""Fixtures of the tests beside."""

from pathlib import Path

import pytest

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.training import optimizing
from outrider.training.teacher import Teacher
from outrider.training.written import Answer, GenerationTask, generate
from tests.tiny_models import tiny_llama


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is good at."""
    monkeypatch.setattr(optimizing, "has_bfloat16", lambda device: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training")
    tiny_llama(made / "target", seed=4, hidden_size=16, num_layers=3, context=64, sharpness=2.0)
    tiny_llama(made / "draft", seed=3, hidden_size=8, num_layers=1, context=64)
    return made


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(str(folder / "target"), "cpu")


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetFiles:
    return TargetFiles(str(folder / "target"))


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Answer]:
    prompts = [([5 + i, 6, 7], (0.0, 1.0)[i % 2]) for i in range(6)]
    return generate(GenerationTask(str(folder / "target"), prompts, 12, seed=1), folder, lambda done, total: None)
