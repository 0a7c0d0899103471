"""Runs a draft's model: rows of the slots that are asked for, and pieces of prompts beside them, in one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from draft_service.draft_slot import DraftSlot
from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.scheduler import StepRequest, StepScheduler, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Fed:
    """What went through."""

    rows: Sequence[tuple[SlotKey, Row]]
    """Of the slots that there was memory for."""
    logits: Tensor
    """[sum(num_logits), V] float32, rows in order."""


class Feeder:
    """Gives and takes the memory of a model's slots."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        growing: Mapping[SlotKey, DraftSlot],
        flush: Callable[[], None],
    ) -> None:
        """growing: all slots of the worker, those whose prompt has to be read among them. flush: lets what is to be
        sent leave; called when the model is about to work.
        """
        self.runner = runner
        self._metrics = metrics
        self._growing = growing
        self._flush = flush
        self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)

    def feed(
        self,
        num_new: Mapping[SlotKey, int],
        row_of: Callable[[SlotKey], Row],
        now: float,
        num_ahead: Mapping[SlotKey, int] = MappingProxyType({}),
    ) -> Fed | None:
        """Run a forward. num_new: tokens beside the committed ones of each slot that is asked for. row_of: makes its
        row, once there is memory for it. None: there was nothing to do.

        num_ahead: tokens at the end of rows, not counted in num_new, that go through only where memory is left for them
        all.
        """
        requests = self._requests(num_new)
        if not requests and not self._turns.num_starved:
            return None
        turn = self._turns.take(requests, now, feed_all=False)
        rows = [(key, row_of(key)) for key in turn.running]
        if not rows and not turn.pieces:
            return Fed((), Tensor()) if turn.worked else None
        self._flush()
        pieces = [piece.row for piece in turn.pieces]
        try:
            logits = self.runner.forward([*(row for _, row in rows), *pieces])
        except OutOfBlocks:
            if not num_ahead:
                raise
            rows = [(key, _without_last(row, num_ahead.get(key, 0))) for key, row in rows]
            logits = self.runner.forward([*(row for _, row in rows), *pieces])
        if not rows:
            self.runner.forward_s()  # nothing else waits for pieces of prompts
        self._turns.done(turn, sum(row.num_new for _, row in rows), time.monotonic() - now)
        self._metrics.batch_size.observe(len(rows) + len(turn.pieces))
        return Fed(rows, logits)

    def next_wake(self) -> float | None:
        return self._turns.next_wake(time.monotonic())

    def _requests(self, num_new: Mapping[SlotKey, int]) -> dict[SlotKey, StepRequest]:
        requests: dict[SlotKey, StepRequest] = {}
        for key, growing in self._growing.items():
            slot = cached(growing)
            if key in num_new:
                requests[key] = StepRequest(Want.STEP, max(len(slot.cached), slot.num_feedable) + num_new[key])
            elif growing.is_growing and needs_prefill(slot):
                requests[key] = StepRequest(Want.PREFILL, slot.num_feedable)
        return requests


def _without_last(row: Row, num: int) -> Row:
    num_new = row.num_new - num
    parents = None if row.parents is None else row.parents[: len(row.parents) - num]
    return replace(row, new_ids=row.new_ids[:num_new], num_logits=row.num_logits - num, parents=parents)


def cached(growing: DraftSlot) -> Slot:
    """Return a model's slot, which has a cache."""
    assert isinstance(growing.slot, Slot), "a model's slot has a cache"
    return growing.slot
