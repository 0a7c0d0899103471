"""Run a draft worker's model or head: the rows of requested slots, and chunks of prompts, in one forward.

The drafters with a model or a head call it once in each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.growth import RowAhead
from outrider.engine.step_plan import Row
from outrider.engine.worker.decisions import Need
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.scheduler import StepRequest, StepScheduler
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.telemetry.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """Request to feed one slot in the next forward."""

    draft_slot: DraftSlot
    """Slot to feed."""
    num_new: int
    """Number of draft tokens or masks to feed after the slot's committed tokens."""
    nodes: Sequence[int] = ()
    """Indices of nodes of the slot's tree, or ROOT, after which logits are needed."""
    ahead: Sequence[RowAhead] = ()
    """Look-ahead rows to feed after the nodes; `num_new` does not count them. If memory does not suffice for those of
    all slots, none are fed."""


class Feeder:
    """Runs the forwards of a draft worker's model or head, and allocates cache memory for the slots."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        draft_slots: Mapping[SlotKey, DraftSlot],
    ) -> None:
        """Create a feeder.

        `max_prefill_tokens`: maximum number of prompt tokens in one forward. `draft_slots`: all slots of the worker by
        key; their prompts are prefilled together with the requested rows.
        """
        self.runner = runner
        self.keeper = keeper
        self._metrics = metrics
        self._draft_slots = draft_slots
        self._scheduler = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)

    def feed(
        self, requests: Mapping[SlotKey, FeedRequest], make_row: Callable[[FeedRequest], Row], now: float
    ) -> tuple[list[tuple[FeedRequest, Row]], Tensor] | None:
        """Run one forward over the requested slots for which there is cache memory, and over pieces of uncached prompts
        of the worker's other slots.

        `requests`: requests by slot key. `make_row`: function that creates the row of a request; it is called once
        there is memory for the row. `now`: monotonic time, in seconds. Returns the requests that were fed, each with
        its row, and the logits [R, V] float32 of these rows in the same order, `row.num_logits` of each. Returns None
        if there was nothing to feed.
        """
        step_requests = self._step_requests(requests)
        if not step_requests and not self._scheduler.num_without_blocks:
            return None
        plan = self._scheduler.schedule(step_requests, now, feed_all=False)
        if not plan.running and not plan.pieces:
            return ([], Tensor()) if plan.has_work else None
        running = [requests[key] for key in plan.running]
        prompt_rows = [piece.row for piece in plan.pieces]
        logits = None
        while logits is None:
            rows = list(map(make_row, running))
            try:
                logits = self.runner.forward([*rows, *prompt_rows])
            except OutOfBlocks:
                if not any(request.ahead for request in running):
                    raise
                running = [replace(request, ahead=()) for request in running]  # and try again without these rows
        if not rows:
            self.runner.forward_s()  # nothing else waits for chunks of prompts
        num_fed = sum(row.num_new for row in rows)
        self._scheduler.note_step(plan, num_fed, time.monotonic() - now)
        self._metrics.batch_size.observe(len(rows) + len(prompt_rows))
        return list(zip(running, rows, strict=True)), logits

    def next_wake(self) -> float | None:
        return self._scheduler.next_wake(time.monotonic())

    def _step_requests(self, requests: Mapping[SlotKey, FeedRequest]) -> dict[SlotKey, StepRequest]:
        step_requests = dict[SlotKey, StepRequest]()
        for key, draft_slot in self._draft_slots.items():
            slot = cache_slot_of(draft_slot)
            if key in requests:
                num_after = max(len(slot.cached), slot.num_feedable) + requests[key].num_new
                step_requests[key] = StepRequest(Need.RUN, num_after)
            elif draft_slot.is_growing and needs_prefill(slot):
                step_requests[key] = StepRequest(Need.PREFILL, slot.num_feedable)
        return step_requests


def cache_slot_of(draft_slot: DraftSlot) -> Slot:
    """Return `draft_slot.slot` as a slot with a KV cache. The worker must have a model or a head."""
    assert isinstance(draft_slot.slot, Slot), "a model's slot has a cache"
    return draft_slot.slot
