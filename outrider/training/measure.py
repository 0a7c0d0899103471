"""Measure how often a student's draft tokens would be accepted, by depth, on text that is not used for training.

Called by `train_head` before and after a training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from outrider.lab.models.tally import Estimate
from outrider.training.losses import TargetDistribution, acceptance
from outrider.training.student import DraftLogits, Student
from outrider.training.teacher import Batch, TargetOutput, Teacher
from outrider.training.written import Answer

AT_ONCE = 4
"""Number of outputs on which acceptance is measured in one forward."""
DEPTH = 3
"""Maximum number of draft tokens of a round whose acceptance is reported, counted from the first. A student that
proposes fewer has fewer rows in the report."""


@torch.no_grad()
def measure_acceptance(
    drafter: str, student: Student, teacher: Teacher, answers: Sequence[Answer], temperature: float
) -> list[dict[str, Any]]:
    """Return one row of the report for each depth (position of a draft token in its round): the mean probability that
    the draft token there is accepted, with the fields of `Estimate`.

    The probability is that of the rejection rule, given that all earlier draft tokens of the round were accepted. At
    temperature 0 it is 1 if student and target have the same most likely token, otherwise 0. drafter: name of the
    student in the rows. answers: outputs that the target generated at `temperature`.
    """
    student.module.eval()
    depth = min(DEPTH, student.depth_limit or DEPTH)
    accepted: list[list[list[float]]] = [[] for _ in range(depth)]  # by depth, output and token
    for first in range(0, len(answers), AT_ONCE):
        batch = Batch.of(answers[first : first + AT_ONCE], teacher.device)
        target_output = teacher.see(batch)
        if temperature == 0.0:
            accept = _match_best(target_output, student.ids)
        else:
            accept = _match_distributions(target_output, student.ids, temperature)
        for draft in student.draft_logits(batch, target_output, depth):
            probabilities = accept(draft)  # [M] float32
            answer_of = draft.token_indices // batch.ids.shape[1]  # [M] int64
            accepted[draft.depth] += [probabilities[answer_of == index].tolist() for index in range(len(batch.ids))]
    student.module.train()
    rows = []
    for index, values in enumerate(accepted):
        row = {
            "drafter": drafter,
            "temperature": temperature,
            "depth": index + 1,
            **asdict(Estimate.of(values)),
            "num_tokens": sum(map(len, values)),
        }
        rows.append(row)
    return rows


Accept = Callable[[DraftLogits], Tensor]
"""Function that takes the logits of the draft tokens of one depth, and returns the acceptance probability of each: [M]
float32."""


def _match_best(target_output: TargetOutput, ids: Tensor | None) -> Accept:
    best = target_output.logits.argmax(dim=-1)  # [M of all] int64

    def accept(draft: DraftLogits) -> Tensor:
        draft_best = draft.logits.argmax(dim=-1)  # [M] int64, an index in ids
        if ids is not None:
            draft_best = ids[draft_best]
        return (draft_best == best[target_output.rows(draft.token_indices)]).float()

    return accept


def _match_distributions(target_output: TargetOutput, ids: Tensor | None, temperature: float) -> Accept:
    target = TargetDistribution.of(target_output.logits / temperature, ids)

    def accept(draft: DraftLogits) -> Tensor:
        log_draft = log_softmax(draft.logits.float() / temperature, dim=-1)  # [M, W] float32
        return acceptance(target.at(target_output.rows(draft.token_indices)), log_draft)

    return accept
