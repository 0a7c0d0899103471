"""Log-probs of a prompt's tokens, piece by piece."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import JobFault, OpenJob
from outrider.engine.worker.scheduler import Chunk
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import BeamParams, SamplingParams
from target_service.step.prompt_scores import begin_scoring, note_scores, pop_scores, scoring_refusal
from tests.unit.outrider.engine.worker.opened import make_table

IDS = [2, 0, 1, 2]
JOB = OpenJob(1, 1, tuple(IDS), len(IDS), SamplingParams(), print, num_prompt_logprobs=1)
EVEN = [0.0, 0.0, 0.0]
DOUBLE = [math.log(2.0), 0.0, 0.0]
"""Logits by which token 0 has a half, and the others a quarter each."""


def scored(slot_id: int = 1) -> Slot:
    slot = make_table().open(1, slot_id, IDS, len(IDS), SamplingParams(max_tokens=9))
    begin_scoring(JOB, slot)
    return slot


def piece(slot: Slot, num_logits: int) -> Chunk:
    return Chunk(slot, Row(slot.table, IDS[:num_logits], 0, num_logits, slot.cached))


def test_the_logits_after_a_token_score_the_next_one() -> None:
    slot, other = scored(1), scored(2)
    assert note_scores([piece(slot, 2), piece(other, 1)], torch.tensor([DOUBLE, EVEN, EVEN])) == []
    assert note_scores([piece(slot, 2)], torch.tensor([DOUBLE, EVEN])) == [], "the second row is of the output"
    reported = [(own, rank) for (own, _, _), rank in pop_scores(slot)]
    quarter, third = math.log(1 / 4), math.log(1 / 3)
    assert [own for own, _ in reported] == pytest.approx([math.log(1 / 2), third, quarter])
    assert reported[0][1] == 1
    assert pop_scores(slot) == (), "only the first verdict has them"
    assert len(pop_scores(other)) == 1


def test_a_slot_whose_logits_are_no_numbers_fails_alone() -> None:
    slot, other = scored(1), scored(2)
    assert note_scores([piece(slot, 1), piece(other, 1)], torch.tensor([[math.nan, 0.0, 0.0], EVEN])) == [slot]
    assert (len(pop_scores(slot)), len(pop_scores(other))) == (0, 1)


def test_a_slot_that_requests_none_has_none() -> None:
    slot = scored()
    slot.scoring = None
    begin_scoring(replace(JOB, num_prompt_logprobs=None), slot)
    assert note_scores([piece(slot, 1)], torch.tensor([EVEN])) == [] and pop_scores(slot) == ()


def test_prompts_of_beams_and_of_encoders_are_not_scored() -> None:
    beams = replace(JOB, params=SamplingParams(temperature=0.0, beams=BeamParams(2)))
    for job, why in ((beams, "use_beam_search is true"), (replace(JOB, source_ids=(5,)), "read by an encoder")):
        error = scoring_refusal(job)
        assert error is not None and error.fault is JobFault.INVALID and why in error.message
        assert scoring_refusal(replace(job, num_prompt_logprobs=None)) is None
    assert scoring_refusal(JOB) is None
