"""Run a training: update the student's weights, and save checkpoints from which it can be continued.

A continued training gives the same weights as one that was not interrupted, bit for bit, on a CPU of the same kind with
as many threads; a GPU sums in no fixed order. The order of the outputs depends on the seed. A limit of time may end a
training and never changes an update: the schedule of learning rates counts updates.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from outrider.training.losses import DEPTH_DECAY, LossName, TargetDistribution, loss_of
from outrider.training.optimizing import Optimizers, rate_scale
from outrider.training.student import Student
from outrider.training.teacher import Batch, Teacher, shuffled
from outrider.training.written import Answer
from outrider.wire.errors import ConfigError, OutriderError

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints of a training."""
REPORT_EVERY_S = 1.0
"""Seconds between two reports of a training's progress."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Settings of a training's updates. Together with the generated text and the untrained student they determine the
    trained weights.
    """

    loss: LossName
    updates: int
    """Number of updates of the weights in the whole training."""
    batch_size: int
    """Number of outputs that one update of the weights trains on."""
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a training at one moment, for a line that shows the progress."""

    updates: int
    """Number of updates of the weights so far."""
    loss: float
    """Mean loss of the updates since the previous report. The loss of an update is the weighted sum over all depths."""
    tokens_per_s: float
    """Number of tokens of prompts and outputs per second, since this process began to train."""
    peak_bytes: int
    """Largest amount of memory that this process has used so far, in bytes."""


class TrainingRun:
    """One training with its checkpoint, which is kept in a folder and from which the training can be continued."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        answers: Sequence[Answer],
        plan: TrainingPlan,
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        """Restore the checkpoint in `folder`; if it has none, begin a training.

        facts: everything else that determines the weights, as values for JSON. Raises ConfigError if the training in
        the folder was begun with another plan or with other facts.
        """
        self._student = student
        self._teacher = teacher
        self._answers = answers
        self._plan = plan
        self._optimizers = Optimizers(student.module)
        self._path = folder / "checkpoint.pt"
        self.num_updates = 0
        """Number of updates so far, in all processes that ran this training."""
        self.trained_s = 0.0
        """Seconds that all updates so far took, in all processes that ran this training."""
        facts = {**facts, **asdict(plan)}
        if self._path.is_file():
            _check_same(folder, facts)
            state = torch.load(self._path, map_location=teacher.device, weights_only=True)
            student.module.load_state_dict(state["weights"], strict=False)  # frozen parameters are not saved
            self._optimizers.set_state(state["optimizers"])
            self.num_updates = state["updates"]
            self.trained_s = state["trained_s"]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "begun.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    @property
    def is_done(self) -> bool:
        """Whether all updates of the plan are made."""
        return self.num_updates >= self._plan.updates

    def train(self, seconds: float | None, stop: Callable[[], bool], report: Callable[[Progress], None]) -> None:
        """Train until all updates of the plan are made, until `seconds` are over or until `stop()` is True, whichever
        comes first. Then save a checkpoint.

        seconds: None = no limit. report: called about every REPORT_EVERY_S seconds, and after the last update of the
        plan.
        """
        start_s = reported_s = saved_s = time.monotonic()
        previous_s = self.trained_s
        num_tokens = 0
        losses: list[float] = []
        order = shuffled(len(self._answers), self._plan.batch_size, self._plan.seed)
        for indices in islice(order, self.num_updates, self._plan.updates):
            now_s = time.monotonic()
            if stop() or (seconds is not None and now_s - start_s >= seconds):
                break
            batch = Batch.of([self._answers[index] for index in indices], self._teacher.device)
            losses.append(self.update(batch))
            num_tokens += int(batch.lengths.sum())
            now_s = time.monotonic()
            self.trained_s = previous_s + now_s - start_s
            if now_s - reported_s >= REPORT_EVERY_S or self.is_done:
                mean_loss = sum(losses) / len(losses)
                report(Progress(self.num_updates, mean_loss, num_tokens / (now_s - start_s), peak_bytes()))
                reported_s = now_s
                losses = []
            if now_s - saved_s >= SAVE_EVERY_S:
                self._save()
                saved_s = now_s
        self._save()

    def update(self, batch: Batch) -> float:
        """Update the weights once, by the outputs in `batch`. Return the loss, a weighted sum over all depths.

        Raises OutriderError if the loss is not finite; the weights are then not changed.
        """
        plan, student = self._plan, self._student
        target_output = self._teacher.see(batch)
        target = TargetDistribution.of(target_output.logits, student.ids)
        total = torch.zeros((), device=self._teacher.device)  # [] float32
        for draft in student.draft_logits(batch, target_output, student.depth_trained):
            if len(draft.token_indices):
                rows = target_output.rows(draft.token_indices)  # [M] int64
                total = total + DEPTH_DECAY**draft.depth * loss_of(plan.loss, target.at(rows), draft.logits)
        loss = float(total.detach())
        if not math.isfinite(loss):
            raise OutriderError(
                f"the loss is {loss} after {self.num_updates} updates; take another --seed or --loss kl"
            )
        if total.requires_grad:
            self._optimizers.step(total, rate_scale(self.num_updates / plan.updates, self.num_updates))
        self.num_updates += 1
        return loss

    def _save(self) -> None:
        weights = {}
        for name, parameter in self._student.module.named_parameters():
            if parameter.requires_grad:
                weights[name] = parameter
        state = {
            "weights": weights,
            "optimizers": self._optimizers.state(),
            "updates": self.num_updates,
            "trained_s": self.trained_s,
        }
        new = self._path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self._path)  # the old checkpoint stays until the new one is complete


def peak_bytes() -> int:
    """Return the largest amount of memory that this process has used so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check_same(folder: Path, facts: dict[str, Any]) -> None:
    begun = json.loads((folder / "begun.json").read_bytes())
    for name in sorted(begun.keys() | facts.keys()):
        if begun.get(name) != facts.get(name):
            raise ConfigError(
                f"the training in {folder} was begun with {name} {begun.get(name)!r}, not {facts.get(name)!r}; repeat "
                "that, take another --work, or remove the folder to begin again"
            )
