"""Updates in bfloat16."""

from pathlib import Path

import pytest

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.training import optimizing
from outrider.training.run import TrainingPlan, TrainingRun
from outrider.training.teacher import Batch, Teacher
from outrider.training.written import Answer
from tests.unit.outrider.training.tiny_training import students


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pass", "draft"])
def test_an_update_in_bfloat16_is_nearly_the_same(
    kind: str,
    folder: Path,
    teacher: Teacher,
    target: TargetFiles,
    answers: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = []
    for in_bfloat16 in (False, True):
        monkeypatch.setattr(optimizing, "has_bfloat16", lambda device, found=in_bfloat16: found)
        student, plan = students(folder, target, teacher)[kind](), TrainingPlan("kl", 7, 4, 3)
        run = TrainingRun(student, teacher, answers, plan, tmp_path / str(in_bfloat16), {})
        losses.append([run.update(Batch.of(answers, "cpu")) for _ in range(2)])
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.02)
