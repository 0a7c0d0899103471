"""Whose draft grows next."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Any

import pytest

from draft_service.drafters.table_drafters import TableSlot, WorkerTableDrafter
from draft_service.growing.grower import Grower
from draft_service.slot_jobs import AdvanceJob, FeaturesRequest
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

VOCAB_SIZE = 12
CIRCLE = [1, 2, 3, 4]


def no_rows(address: str, epoch: int, request: FeaturesRequest) -> None:
    raise AssertionError("a table reads no rows")


@pytest.mark.parametrize("callers", [(b"one", b"many"), (b"", b"")])
def test_what_one_caller_has_drafted_does_not_keep_another_waiting(callers: tuple[bytes, bytes]) -> None:
    metrics, engine, num_nodes = WorkerMetrics("draft"), AtOnce(), Counter[int]()
    drafter = Bigram(CIRCLE * 3)
    keeper = SlotKeeper(OpenSlots[BareSlot](partial(TableSlot, drafter), 99, 99), engine, metrics, VOCAB_SIZE, ())

    def take(address: str, epoch: int, nodes: Delivery) -> None:
        num_nodes[nodes.ticket] += len(nodes.ids)

    grower = Grower(lambda own: WorkerTableDrafter(keeper), keeper, engine, take, metrics, no_rows)
    rest: dict[str, Any] = {"speculation": Speculation(max_draft_tokens=32), "target_address": "target:1"}
    for slot in range(60):
        scheduling = Scheduling(callers[slot != 59])
        params = SamplingParams(max_tokens=60, temperature=0.0)
        grower.handle(OpenJob(1, slot, (9, 1), 2, params, lambda answer: None, scheduling=scheduling, **rest))
        grower.handle(AdvanceJob(1, slot, slot + 1, 2, ()))
    while sum(num_nodes.values()) < 40:
        assert grower.step(time.monotonic())
    assert (num_nodes[60] >= 5) is (callers[0] != b"")


def test_a_slot_that_was_not_fed_has_spent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there was no memory for it."""

    class FeedsOne(WorkerTableDrafter):
        def propose(self, requests: Any, now: float) -> Any:
            return super().propose(requests[:1], now)

    metrics, engine = WorkerMetrics("draft"), AtOnce()
    slots = OpenSlots[BareSlot](partial(TableSlot, Bigram(CIRCLE * 3)), 2, 99)
    keeper = SlotKeeper(slots, engine, metrics, VOCAB_SIZE, ())
    grower = Grower(lambda own: FeedsOne(keeper), keeper, engine, lambda *_: None, metrics, no_rows)
    for slot in range(2):
        params = SamplingParams(max_tokens=60, temperature=0.0)
        rest: dict[str, Any] = {"speculation": Speculation(max_draft_tokens=16), "target_address": "target:1"}
        grower.handle(OpenJob(1, slot, (9, 1), 2, params, lambda answer: None, **rest))
        grower.handle(AdvanceJob(1, slot, slot + 1, 2, ()))
    monkeypatch.setattr(grower._scheduler, "choose", lambda own, now: [(growing, [ROOT]) for growing in own])
    assert grower.step(time.monotonic())
    (spent_s,) = [growing.spent_s for growing in grower._slots.values() if not growing.tree.has_drafts]
    assert spent_s == 0
