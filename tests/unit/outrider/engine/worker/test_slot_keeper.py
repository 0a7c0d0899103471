"""What messages do to slots, and what a sender is told of those that cannot be applied."""

from functools import partial
from typing import Any

import pytest

from outrider.engine.worker.jobs import CloseOwnerJob, JobError, JobFault, OpenJob, SlotOpened, TruncateJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.drafters.grown import AtOnce
from tests.unit.outrider.engine.worker.opened import PROMPT, feed, make_table

VOCAB_SIZE = 12


@pytest.fixture
def keeper() -> SlotKeeper[Slot]:
    return SlotKeeper(make_table(max_slots=2), AtOnce(), WorkerMetrics("target"), VOCAB_SIZE, (0,))


def opened(keeper: SlotKeeper[Slot], slot_id: int, ids: list[int] = PROMPT) -> tuple[Slot | None, Any]:
    """Open a slot for at most 4 tokens; return it and the answer."""
    answers = list[Any]()
    params = SamplingParams(max_tokens=4)
    slot = keeper.open(OpenJob(1, slot_id, tuple(ids), len(ids), params, answers.append))
    return slot, *answers


def test_an_open_is_answered_with_its_length_or_why_not(keeper: SlotKeeper[Slot]) -> None:
    slot, answer = opened(keeper, 1)
    assert slot is not None and answer == SlotOpened(4)
    refused, answer = opened(keeper, 2, [5, VOCAB_SIZE])
    assert refused is None and answer.fault is JobFault.INVALID and str(VOCAB_SIZE) in answer.message
    opened(keeper, 2)
    refused, answer = opened(keeper, 3)
    assert refused is None and answer.fault is JobFault.EXHAUSTED and "all 2 slots are in use" in answer.message


@pytest.mark.parametrize(
    ("slot_id", "base_len", "ids", "fault", "committed_len", "why"),
    [
        (7, 4, [1], JobFault.UNKNOWN_SLOT, 0, "slot 7 is not open here"),
        (1, 6, [1], JobFault.BEHIND, 4, "slot 1 knows 4 tokens"),
        (1, 4, [1, 2, 3, 4], JobFault.INVALID, 0, "make 8 tokens, prompt and max_tokens are 8: no token is left"),
        (1, 4, [VOCAB_SIZE], JobFault.INVALID, 0, "committed_ids"),
        (1, 3, [], JobFault.INVALID, 0, "make 3 tokens, this slot holds 4 to 8"),
    ],
)
def test_a_commit_that_cannot_be_changes_nothing(
    keeper: SlotKeeper[Slot], slot_id: int, base_len: int, ids: list[int], fault: JobFault, committed_len: int, why: str
) -> None:
    slot, _ = opened(keeper, 1)
    error = keeper.commit(1, slot_id, base_len, ids)
    assert isinstance(error, JobError) and (error.fault, error.committed_len) == (fault, committed_len)
    assert why in error.message
    assert slot is not None and slot.committed == PROMPT


def test_a_commit_takes_back_what_was_cached_otherwise(keeper: SlotKeeper[Slot]) -> None:
    slot, _ = opened(keeper, 1)
    assert slot is not None
    feed(slot, [*PROMPT, 9, 10])
    assert keeper.commit(1, 1, 4, [9, 11]) is slot
    assert (slot.committed, slot.cached) == ([*PROMPT, 9, 11], [*PROMPT, 9])


def test_a_truncate_counts_what_it_frees_and_finds_no_closed_slot(keeper: SlotKeeper[Slot]) -> None:
    slot, _ = opened(keeper, 1)
    assert slot is not None
    feed(slot, [*PROMPT, 9])
    truncate = partial(TruncateJob, 1, committed_len=3, reason="late")
    keeper.truncate(truncate(1), keeps=True)
    assert len(slot.cached) == 5
    keeper.truncate(truncate(1))
    assert slot.cached == PROMPT[:2]
    keeper.close_owner(CloseOwnerJob(1))
    keeper.truncate(truncate(1))
    assert keeper.table.num_in_use == 0
