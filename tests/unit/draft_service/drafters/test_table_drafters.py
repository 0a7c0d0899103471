"""A draft without a model grows and sends as one with a model does: what its table says of what was committed."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from draft_service.drafters.table_drafters import TableSlot, WorkerTableDrafter
from draft_service.growing.grower import Grower
from draft_service.slot_jobs import AdvanceJob, FeaturesRequest
from outrider.drafting.lookup import Lookup
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.plan import MAX_DEPTH
from outrider.engine.worker.jobs import CloseJob, JobError, JobFault, OpenJob
from outrider.engine.worker.open_slots import BareSlot, OpenSlots
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.papers.count_tables import Bigram
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.draft_buffer import DraftBuffer
from tests.unit.draft_service.drafters.grown import AtOnce

VOCAB_SIZE = 12
CIRCLE = [1, 2, 3, 4]


def no_rows(address: str, epoch: int, request: FeaturesRequest) -> None:
    raise AssertionError("a table reads no rows")


class Draft:
    """With the mirror of a target that is told what it is told."""

    def __init__(self, drafter: SequenceDrafter, prompt: Sequence[int], **params: Any) -> None:
        metrics, engine = WorkerMetrics("draft"), AtOnce()
        slots = OpenSlots[BareSlot](partial(TableSlot, drafter), 4, 99)
        keeper = SlotKeeper(slots, engine, metrics, VOCAB_SIZE, ())
        self.grower = Grower(lambda growing: WorkerTableDrafter(keeper), keeper, engine, self.take, metrics, no_rows)
        self.engine, self.num_messages = engine, 0
        self.committed, self.buffer, self.said = list(prompt), DraftBuffer(), list[Any]()
        self.params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **params})
        rest: dict[str, Any] = {"speculation": Speculation(max_draft_tokens=16), "target_address": "target:1"}
        self.grower.handle(OpenJob(1, 1, tuple(prompt), len(prompt), self.params, self.said.append, **rest))
        self.commit([])

    def take(self, address: str, epoch: int, nodes: Delivery) -> None:
        self.buffer.insert(nodes, self.committed, 1 << 20)
        self.num_messages += 1

    def commit(self, ids: list[int]) -> list[int]:
        """Return what is parked after these tokens, when all is grown."""
        base_len = len(self.committed)
        self.committed += ids
        self.buffer.advance(ids, 0, None)
        self.grower.handle(AdvanceJob(1, 1, 1, base_len, tuple(ids)))
        num_steps, self.num_messages, self.engine.num_flushes = 1, 0, 0
        while self.grower.step(time.monotonic()):
            num_steps += 1
        num_flushes = num_steps
        if not self.params.is_deterministic:
            num_flushes += self.num_messages  # what is drawn leaves at once
        assert self.engine.num_flushes == num_flushes, "what one step made waits for no rest that may not come"
        return self.chain

    @property
    def chain(self) -> list[int]:
        return [self.buffer.tree.ids[node] for node in self.buffer.chain(99)]


def check_circle(chain: list[int], circle: list[int], first: int) -> None:
    assert 5 < len(chain) <= MAX_DEPTH
    start = circle.index(first)
    assert chain == [circle[(start + place) % len(circle)] for place in range(len(chain))]


RULES = pytest.mark.parametrize(
    "rule",
    [{"temperature": 0.0}, {"acceptance": AcceptanceRule.COUPLED, "seed": 1}, {"seed": 1}],
    ids=["greedy", "coupled", "rejection"],
)


@RULES
def test_it_follows_what_is_committed(rule: dict[str, Any]) -> None:
    draft = Draft(Bigram(CIRCLE * 3), [9, 1], **rule)
    check_circle(draft.chain, CIRCLE, 2)
    check_circle(draft.commit([2, 3]), CIRCLE, 4)
    check_circle(draft.commit([2]), CIRCLE, 3)  # which was not foreseen
    assert {draft.buffer.tokens[node].kind for node in draft.buffer.chain(99)} == {NodeKind.DETERMINISTIC}, (
        "there was no choice"
    )


@RULES
def test_where_it_has_no_entry_the_target_need_not_wait(rule: dict[str, Any]) -> None:
    draft = Draft(Lookup(2, 4), [1, 2, 3], **rule)
    assert not draft.chain and draft.buffer.is_ended
    check_circle(draft.commit([1, 2]), [1, 2, 3], 3)
    assert not draft.buffer.is_ended
    assert not draft.commit([9]) and draft.buffer.is_ended


def test_with_a_choice_it_draws_from_its_distribution() -> None:
    draft = Draft(Bigram([1, 2, 1, 3, 1, 2, 1, 3, 2, 1]), [9, 1], seed=4)
    (first,) = draft.buffer.chain(1)
    assert draft.buffer.tokens[first].kind is NodeKind.SAMPLED and draft.buffer.tree.ids[first] in (2, 3)


def test_a_gap_is_reported_and_a_closed_slot_grows_no_more() -> None:
    draft = Draft(Bigram(CIRCLE), [9, 1], temperature=0.0)
    draft.grower.handle(AdvanceJob(1, 1, 1, 7, (1,)))
    assert isinstance(error := draft.said[-1], JobError) and error.fault is JobFault.BEHIND and error.committed_len == 2
    draft.grower.handle(CloseJob(1, 1))
    assert not draft.grower.step(time.monotonic())
