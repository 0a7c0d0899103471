"""Acceptance of a drafter by depth, along what the target wrote to prompts that were held apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from outrider.lab.models.alpha import Estimate
from outrider.training.losses import Law, acceptance
from outrider.training.student import Guess, Student
from outrider.training.teacher import Batch, Seen, Teacher
from outrider.training.written import Answer

AT_ONCE = 4
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
        keeps = _best(seen, student.ids) if temperature == 0.0 else _kept(seen, student.ids, temperature)
        for guess in student.guesses(batch, seen, depth):
            kept = keeps(guess)  # [M]
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


def _best(seen: Seen, ids: Tensor | None) -> Callable[[Guess], Tensor]:
    """Return what gives [M], of a guess, whether both have the same best token. ids: of the guess's logits."""
    best = seen.logits.argmax(dim=-1)

    def keeps(guess: Guess) -> Tensor:
        own = guess.logits.argmax(dim=-1)
        return ((own if ids is None else ids[own]) == best[seen.rows(guess.places)]).float()

    return keeps


def _kept(seen: Seen, ids: Tensor | None, temperature: float) -> Callable[[Guess], Tensor]:
    """Return what gives [M], of a guess, the probability that its token is kept. ids: of the guess's logits."""
    law = Law.of(seen.logits / temperature, ids)

    def keeps(guess: Guess) -> Tensor:
        log_draft = log_softmax(guess.logits.float() / temperature, dim=-1)
        return acceptance(law.at(seen.rows(guess.places)), log_draft)

    return keeps
