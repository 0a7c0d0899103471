"""What a drafter has accepted, measured at every depth."""

from pathlib import Path

import pytest

from outrider.training.measure import measure_acceptance
from outrider.training.student import Draft
from outrider.training.teacher import Teacher
from outrider.training.written import Answer


def test_a_target_accepts_itself_at_every_depth(folder: Path, teacher: Teacher, answers: list[Answer]) -> None:
    for temperature in (0.0, 0.7, 1.0):
        means = {}
        for name in ("target", "draft"):
            student = Draft(str(folder / name), teacher.vocab_size, "cpu")
            rows = measure_acceptance(name, student, teacher, answers, temperature)
            assert [row["depth"] for row in rows] == [1, 2, 3]
            assert [row["num_tokens"] for row in rows] == [
                sum(max(0, len(answer.ids) - answer.start - depth) for answer in answers) for depth in range(3)
            ]
            means[name] = [row["mean"] for row in rows]
        assert means["target"] == pytest.approx([1.0] * 3, abs=1e-5) and max(means["draft"]) < 0.9
