"""The engine worker of a draft without a model: every proposal that is asked for is made in the next step, as a chain
of what its slot's follower says. Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from draft_service.active import Asked, Drawn
from draft_service.desk import Desk
from draft_service.jobs import PartOut
from draft_service.sender import Sender
from draft_service.table_slot import TableSlot
from outrider.engine.chain import draw_chain
from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import CloseJob, Fault
from outrider.engine.slot_keeper import SlotKeeper
from outrider.wire.metrics import WorkerMetrics


@dataclass(slots=True)
class AskedOfTables(Asked):
    slot: TableSlot


class TableProposer:
    def __init__(
        self,
        keeper: SlotKeeper[TableSlot],
        engine: EngineThread,
        deliver: Callable[[PartOut], None],
        metrics: WorkerMetrics,
        vocab_size: int,
        full_logprobs_budget_bytes: int,
    ) -> None:
        self._keeper = keeper
        self._sender = Sender(engine, deliver)
        self._desk = Desk(keeper, engine, metrics, vocab_size, full_logprobs_budget_bytes, AskedOfTables)
        self._metrics = metrics
        self._vocab_size = vocab_size

    def handle(self, job: object) -> None:
        self._desk.handle(job)

    def next_wake(self) -> float | None:
        return None

    def step(self, now: float) -> bool:
        asked = list(self._desk.active.values())
        if not asked:
            return False
        for a in asked:
            a.started_s = now
        for a in asked:
            self._make(a)
        self._metrics.batch_size.observe(len(asked))
        self._metrics.busy_seconds.inc(time.monotonic() - now)
        return True

    def fail_step(self, error: Exception) -> None:
        """What the slots' followers hold cannot be trusted any more: the gateway opens them again."""
        for a in list(self._desk.active.values()):
            self._desk.cancel(*a.slot.key, f"the draft's step failed: {error}", Fault.INTERNAL)
            a.slot.distrust()
            self._keeper.close(CloseJob(*a.slot.key))

    def _make(self, a: AskedOfTables) -> None:
        state, committed_len = self._keeper.sampling_state(a.slot), len(a.slot.committed)
        chain = draw_chain(
            a.slot.follower.walk(), state, committed_len, a.job.num_draft_tokens, self._vocab_size, a.topk
        )
        a.length = len(chain.ids)
        for index, token_id in enumerate(chain.ids):
            a.take(Drawn(token_id, None if chain.laws is None else chain.laws[index]))
            self._sender.send_large(a)
        self._sender.send_due(a)
        self._desk.finish(a)
