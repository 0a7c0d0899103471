"""Acceptance of a drafter by depth, along what the target wrote to prompts that were held apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from outrider.engine.alpha import Estimate
from outrider.training.losses import Law, acceptance
from outrider.training.student import Guess, Student
from outrider.training.teacher import Batch, Teacher
from outrider.training.written import Answer

AT_ONCE = 8
"""Answers that are measured side by side. Doubling it doubles the laws in memory."""
DEPTH = 3
"""Draft tokens whose acceptance is told. Doubling it tells of tokens that few rounds reach."""


@torch.no_grad()
def measured(
    drafter: str, student: Student, teacher: Teacher, answers: Sequence[Answer], temperature: float
) -> list[dict[str, Any]]:
    """Return for each depth the mean acceptance of the draft token there, with its interval.

    answers: written at that temperature. The acceptance is that of rejection, given that the draft tokens before were
    accepted: a head has its own carries for them. At temperature 0 it is whether both have the same best token.
    """
    student.module.eval()
    depth = min(DEPTH, student.depth_limit or DEPTH)
    found: list[list[list[float]]] = [[] for _ in range(depth)]  # by depth and answer
    for first in range(0, len(answers), AT_ONCE):
        batch = Batch.of(answers[first : first + AT_ONCE], teacher.device)
        seen = teacher.see(batch)
        for guess in student.guesses(batch, seen, depth):
            kept = accepted(seen.logits[seen.rows(guess.places)], guess, student.ids, temperature)
            rows = guess.places // batch.ids.shape[1]
            found[guess.depth] += [kept[rows == row].tolist() for row in range(len(batch.ids))]
    student.module.train()
    return [
        {
            "drafter": drafter,
            "temperature": temperature,
            "depth": index + 1,
            **asdict(Estimate.of(values)),
            "num_tokens": sum(map(len, values)),
        }
        for index, values in enumerate(found)
    ]


def accepted(target_logits: Tensor, guess: Guess, ids: Tensor | None, temperature: float) -> Tensor:
    """Return [M], by the target's logits [M, V] at the guess's places, the probability that its token is kept."""
    logits = guess.logits.float()
    if temperature == 0.0:
        best = logits.argmax(dim=-1)
        return ((best if ids is None else ids[best]) == target_logits.argmax(dim=-1)).float()
    return acceptance(Law.of(target_logits / temperature, ids), log_softmax(logits / temperature, dim=-1))
