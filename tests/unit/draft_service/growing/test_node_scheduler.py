"""Whose draft grows next."""

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from draft_service.drafters.table_drafters import TableSlot, WorkerTableDrafter
from draft_service.growing.grower import Grower
from draft_service.slot_jobs import AdvanceJob
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.open_slots import BareSlot, OpenSlots
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.papers.count_tables import Bigram
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.drafters.grown import AtOnce
from tests.unit.draft_service.drafters.test_table_drafters import CIRCLE, VOCAB_SIZE, no_rows


class Draft:
    """Slots of a table that go round in a circle."""

    def __init__(self, drafter: type[WorkerTableDrafter] = WorkerTableDrafter) -> None:
        metrics, engine, self.num_nodes = WorkerMetrics("draft"), AtOnce(), Counter[int]()
        slots = OpenSlots[BareSlot](partial(TableSlot, Bigram(CIRCLE * 3)), 99, 99)
        keeper = SlotKeeper(slots, engine, metrics, VOCAB_SIZE, ())
        self.grower = Grower(lambda own: drafter(keeper), keeper, engine, self.take, metrics, no_rows)

    def take(self, address: str, epoch: int, nodes: Delivery) -> None:
        self.num_nodes[nodes.ticket] += len(nodes.ids)

    def open(self, slot: int, caller: bytes = b"") -> None:
        params = SamplingParams(max_tokens=60, temperature=0.0)
        job = OpenJob(1, slot, (9, 1), 2, params, lambda answer: None, target_address="target:1")
        self.grower.handle(replace(job, speculation=Speculation(max_draft_tokens=32), scheduling=Scheduling(caller)))
        self.grower.handle(AdvanceJob(1, slot, slot + 1, 2, ()))


@pytest.mark.parametrize("callers", [(b"one", b"many"), (b"", b"")])
def test_what_one_caller_has_drafted_does_not_keep_another_waiting(callers: tuple[bytes, bytes]) -> None:
    draft = Draft()
    for slot in range(60):
        draft.open(slot, callers[slot != 59])
    while draft.num_nodes.total() < 40:
        assert draft.grower.step(time.monotonic())
    assert (draft.num_nodes[60] >= 5) is (callers[0] != b"")


def test_a_slot_that_was_not_fed_has_spent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there was no memory for it."""

    class FeedsOne(WorkerTableDrafter):
        def propose(self, requests: Any, now: float) -> Any:
            return super().propose(requests[:1], now)

    draft = Draft(FeedsOne)
    for slot in range(2):
        draft.open(slot)
    monkeypatch.setattr(draft.grower._scheduler, "choose", lambda own, now: [(growing, [ROOT]) for growing in own])
    assert draft.grower.step(time.monotonic())
    (spent_s,) = [growing.spent_s for growing in draft.grower._slots.values() if not growing.tree.has_drafts]
    assert spent_s == 0
