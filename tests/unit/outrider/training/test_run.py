"""Trainings that are interrupted, whose time is up, or that come to nothing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.training import run as running
from outrider.training.medusa_student import Medusa
from outrider.training.run import TrainingPlan, TrainingRun
from outrider.training.teacher import Teacher
from outrider.training.written import Answer
from outrider.wire.errors import ConfigError, OutriderError
from tests.unit.outrider.training.tiny_training import students


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pass", "draft"])
def test_an_interrupted_training_comes_to_the_same_bits(
    kind: str, folder: Path, teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    make, plan = students(folder, target, teacher)[kind], TrainingPlan("lk", 7, 4, seed=3)

    def weights(name: str, ends: list[int]) -> dict[str, torch.Tensor]:
        """Train in as many processes' worth of objects as there are ends."""
        for end in ends:
            student = make()
            run = TrainingRun(student, teacher, answers, plan, tmp_path / name, {"kind": kind})
            run.train(None, lambda run=run, end=end: run.num_updates >= end, lambda progress: None)  # type: ignore[misc]
        assert run.is_done
        return dict(student.module.state_dict())

    whole, parts = weights("whole", [7]), weights("parts", [2, 3, 7])
    untrained = make().module.state_dict()
    assert any(not torch.equal(whole[name], untrained[name]) for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(ConfigError, match="was begun with updates 7, not 8"):
        TrainingRun(make(), teacher, answers, replace(plan, updates=8), tmp_path / "parts", {"kind": kind})


def test_time_ends_a_training_and_leaves_its_schedule(
    folder: Path,
    teacher: Teacher,
    target: TargetFiles,
    answers: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(running.time, "monotonic", lambda: float(next(clock)))
    run = TrainingRun(Medusa.new(target, 1, "cpu"), teacher, answers, TrainingPlan("kl", 50, 2, seed=0), tmp_path, {})
    run.train(6.0, lambda: False, lambda progress: None)
    assert 0 < run.num_updates < 5 and not run.is_done
    again = TrainingRun(Medusa.new(target, 1, "cpu"), teacher, answers, TrainingPlan("kl", 50, 2, seed=0), tmp_path, {})
    assert again.num_updates == run.num_updates


def test_a_loss_that_is_not_finite_ends_the_training(
    teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    student = Medusa.new(target, 1, "cpu")
    run = TrainingRun(student, teacher, answers, TrainingPlan("kl", 5, 2, seed=0), tmp_path, {})
    with torch.no_grad():
        next(student.module.blocks.parameters()).fill_(math.nan)
    with pytest.raises(OutriderError, match="the loss is nan after 0 updates"):
        run.train(None, lambda: False, lambda progress: None)
    assert not (tmp_path / "checkpoint.pt").exists()
