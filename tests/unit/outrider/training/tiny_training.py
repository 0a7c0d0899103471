"""A tiny target, answers that it wrote, and trainings of heads for it."""

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.training.eagle3_student import Eagle3, ProjectedHead
from outrider.training.medusa_student import Medusa
from outrider.training.pass_embeddings import LookaheadEmbeddings
from outrider.training.student import Draft, Student
from outrider.training.task import TrainingTask
from outrider.training.teacher import Batch, Teacher


def says_the_same(one: Student, other: Student, batch: Batch, teacher: Teacher) -> None:
    """As far as bfloat16 lets it."""
    seen = teacher.see(batch)
    both = zip(one.draft_logits(batch, seen, 2), other.draft_logits(batch, seen, 2), strict=True)
    for mine, its in both:
        assert torch.equal(mine.token_indices, its.token_indices)
        assert (mine.logits - its.logits).abs().max() < 0.05 * mine.logits.std()


def students(folder: Path, target: TargetFiles, teacher: Teacher) -> dict[str, Callable[[], Student]]:
    draft = str(folder / "draft")
    return {
        "eagle3": lambda: Eagle3(ProjectedHead.new(target, draft, (1, 2), None, seed=5), 2, "cpu"),
        "medusa": lambda: Medusa.new(target, 2, "cpu"),
        "pass": lambda: LookaheadEmbeddings.new(teacher, 2, seed=5),
        "draft": lambda: Draft(draft, target.vocab_size, "cpu"),
    }


def task(folder: Path, out: Path) -> TrainingTask:
    folders = {"target": str(folder / "target"), "out": str(out), "work": str(out.parent / "work")}
    texts = {"prompts": [f"the {i}" for i in range(12)], "held_apart": ["a b", "c d"], "temperatures": [0.0, 1.0]}
    plan = {"loss": "lk", "depth": 2, "updates": 4, "batch_size": 4, "max_tokens": 8, "seed": 0}
    unset = dict.fromkeys(("start", "taps", "draft_vocab", "seconds"))
    return TrainingTask(kind="medusa", **folders, **texts, **plan, **unset)
