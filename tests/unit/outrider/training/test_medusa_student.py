"""Medusa's heads that learn."""

from pathlib import Path

import torch

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.kinds import MEDUSA, kind_of
from outrider.training.medusa_student import Medusa
from outrider.training.teacher import Batch, Teacher
from outrider.training.written import Answer
from tests.unit.outrider.training.tiny_training import says_the_same


def test_medusas_heads_read_the_row_before_what_they_skip(
    teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    student = Medusa.new(target, 3, "cpu")
    batch = Batch.of(answers, "cpu")
    seen = teacher.see(batch)
    length = batch.ids.shape[1]
    said = teacher.network(batch.ids).logits.flatten(0, 1)  # [B * T, V]
    for guess in student.draft_logits(batch, seen, 3):  # untrained: what the target says after the token that was read
        rows = said[guess.token_indices - 1 - guess.depth]
        torch.testing.assert_close(guess.logits, rows, rtol=1e-4, atol=1e-4)
        assert ((guess.token_indices - 1 - guess.depth) // length == guess.token_indices // length).all()
    with torch.no_grad():
        for parameter in student.module.blocks.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    student.save(tmp_path)
    files = Checkpoint(str(tmp_path))
    assert kind_of(files) is MEDUSA and not any("lm_head" in name for name in files.names)
    says_the_same(student, Medusa.load(str(tmp_path), target, "cpu"), batch, teacher)
