"""One training, which may be interrupted: continued, it comes to the same weights, bit for bit.

That holds on a CPU of the same kind with as many threads; a GPU sums in no fixed order.

Nothing in it is left to chance but the order of the answers, which the seed decides. Time may end it early and never
changes what an update does: the schedule counts updates.
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

from outrider.training.losses import DEPTH_DECAY, Law, LossName, loss_of
from outrider.training.optimizing import Optimizers, rate_scale
from outrider.training.student import Student
from outrider.training.teacher import Batch, Teacher, shuffled
from outrider.training.written import Answer
from outrider.wire.errors import ConfigError, OutriderError

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints. Doubling it loses twice as much where a process is killed."""
TELL_EVERY_S = 1.0
"""Seconds between two words on how it goes. Doubling it halves the lines."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides the weights, besides the text and the student's beginning."""

    loss: LossName
    updates: int
    batch_size: int
    """Answers an update."""
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is."""

    updates: int
    loss: float
    """Mean over the updates since the last word, weighted over depths."""
    tokens_per_s: float
    """Tokens of batches, prompts included."""
    peak_bytes: int
    """Most memory that the process ever held."""


class Run:
    """A training in a folder of its own."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        answers: Sequence[Answer],
        plan: Plan,
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        """Go on from the folder's checkpoint where it has one.

        facts: whatever else decides the weights, as JSON has it. Raises ConfigError where the folder's training was
        begun with other ones.
        """
        self._student, self._teacher, self._answers, self._plan = student, teacher, answers, plan
        self._optimizers = Optimizers(student.module)
        self._path = folder / "checkpoint.pt"
        self.num_updates = 0
        self.trained_s = 0.0
        """Seconds of all its updates, in whichever process they were made."""
        facts = {**facts, **asdict(plan)}
        if self._path.is_file():
            _check_same(folder, facts)
            state = torch.load(self._path, map_location=teacher.device, weights_only=True)
            student.module.load_state_dict(state["weights"], strict=False)  # what is frozen is not saved
            self._optimizers.set_state(state["optimizers"])
            self.num_updates, self.trained_s = state["updates"], state["trained_s"]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "begun.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    @property
    def is_done(self) -> bool:
        return self.num_updates >= self._plan.updates

    def go_on(self, seconds: float | None, stop: Callable[[], bool], tell: Callable[[Progress], None]) -> None:
        """Train until all updates are done, `seconds` are over or `stop` says so; save a checkpoint at the end."""
        start_s = said_s = saved_s = time.monotonic()
        before_s = self.trained_s
        num_tokens, losses = 0, list[float]()
        order = shuffled(len(self._answers), self._plan.batch_size, self._plan.seed)
        for indices in islice(order, self.num_updates, self._plan.updates):
            now_s = time.monotonic()
            if stop() or (seconds is not None and now_s - start_s >= seconds):
                break
            batch = Batch.of([self._answers[i] for i in indices], self._teacher.device)
            losses.append(self.update(batch))
            num_tokens += int(batch.lengths.sum())
            now_s = time.monotonic()
            self.trained_s = before_s + now_s - start_s
            if now_s - said_s >= TELL_EVERY_S or self.is_done:
                mean = sum(losses) / len(losses)
                tell(Progress(self.num_updates, mean, num_tokens / (now_s - start_s), peak_bytes()))
                said_s, losses = now_s, []
            if now_s - saved_s >= SAVE_EVERY_S:
                self._save()
                saved_s = now_s
        self._save()

    def update(self, batch: Batch) -> float:
        """Make one update and return its loss. Raises OutriderError for one that is not finite, and changes nothing."""
        plan, student = self._plan, self._student
        seen = self._teacher.see(batch)
        law = Law.of(seen.logits, student.ids)
        total = torch.zeros((), device=self._teacher.device)
        for guess in student.guesses(batch, seen, student.depth_trained):
            if len(guess.places):
                total = total + DEPTH_DECAY**guess.depth * loss_of(
                    plan.loss, law.at(seen.rows(guess.places)), guess.logits
                )
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
        """Replace the checkpoint, whole or not at all."""
        new = self._path.with_suffix(".new")
        state = {
            "weights": {name: p for name, p in self._student.module.named_parameters() if p.requires_grad},
            "optimizers": self._optimizers.state(),
            "updates": self.num_updates,
            "trained_s": self.trained_s,
        }
        torch.save(state, new)
        os.replace(new, self._path)


def peak_bytes() -> int:
    """Return the most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check_same(folder: Path, facts: dict[str, Any]) -> None:
    begun = json.loads((folder / "begun.json").read_bytes())
    for name in sorted(begun.keys() | facts.keys()):
        if begun.get(name) != facts.get(name):
            raise ConfigError(
                f"the training in {folder} was begun with {name} {begun.get(name)!r}, not {facts.get(name)!r}; repeat "
                "that, take another --work, or remove the folder to begin again"
            )
