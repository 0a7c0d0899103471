"""The draft's engine worker: every active proposal advances by one token a step, or a tree by one level.

Slots join and leave in between; `drawing` draws. Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

from torch import Tensor

from draft_service.active import Active, ProposalQueue
from draft_service.deliveries import Sender
from draft_service.drawing import draw_tokens, grow_level
from draft_service.jobs import PartOut
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault
from outrider.engine.worker.scheduler import StepScheduler
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.metrics import WorkerMetrics


class Proposer:
    """Runs the draft's jobs and steps."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        engine: EngineThread,
        deliver: Callable[[PartOut], None],
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._sender = Sender(engine, deliver)
        rest = runner.facts.vocab_size, Active, runner.tree_refusal
        self._queue = ProposalQueue(keeper, engine, metrics, *rest)
        self._metrics = metrics
        self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)

    def handle(self, job: object) -> None:
        self._queue.handle(job)

    def next_wake(self) -> float | None:
        return self._turns.next_wake(time.monotonic())

    def step(self, now: float) -> bool:
        """Run one forward over all proposals whose prompt is in, and pieces of the others' prompts beside them."""
        if not self._queue.active and not self._turns.num_starved:
            return False
        step_requests = {key: a.step_request() for key, a in self._queue.active.items()}
        turn = self._turns.take(step_requests, now, feed_all=False)
        if not turn.running and not turn.pieces:
            return turn.worked
        for key, a in self._queue.active.items():
            if a.started_s is None and key not in turn.starved:
                a.started_s = now
        ready = [self._queue.active[key] for key in turn.running]
        rows = [a.row() for a in ready]
        logits = self._runner.forward([*rows, *(p.row for p in turn.pieces)])  # [R, V] float32
        for piece in turn.pieces:
            self._queue.active[piece.slot.key].num_fed += piece.row.num_new
        for a, row in zip(ready, rows, strict=True):
            a.fed(row)
        if ready:
            self._extend(ready, rows, logits)
        else:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        seconds = time.monotonic() - now
        self._turns.done(turn, sum(row.num_new for row in rows), seconds)
        self._metrics.batch_size.observe(len(turn.running) + len(turn.pieces))
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    def fail_step(self, error: Exception) -> None:
        """Answer every job of the failed step. The slots' caches cannot be trusted: the gateway opens them again."""
        for a in list(self._queue.active.values()):
            self._queue.cancel(a.job.owner, a.job.slot_id, f"the draft's step failed: {error}", Fault.INTERNAL)
            a.slot.distrust()
            self._keeper.close(CloseJob(a.job.owner, a.job.slot_id))

    def _extend(self, ready: list[Active], rows: list[Row], logits: Tensor) -> None:
        """Draw what follows in each slot, a token of a chain or a level of a tree, from logits [R, V]: one row for a
        chain, one for each node of a tree's frontier.
        """
        starts = list(accumulate((row.num_logits for row in rows), initial=0))
        trees = [(a, start) for a, start in zip(ready, starts, strict=False) if a.growth is not None]
        if trees:
            host, chains = HostLogits(logits), [i for i, a in enumerate(ready) if a.growth is None]
            for a, start in trees:
                self._grow(a, host, start)
            ready, logits = [ready[i] for i in chains], logits[[starts[i] for i in chains]]
        if ready:
            self._extend_chains(ready, logits)

    def _grow(self, a: Active, host: HostLogits, start: int) -> None:
        """Grow a tree by a level, and send it when that is the last."""
        try:
            grow_level(a, self._keeper.sampling_state(a.slot), host, start)
        except NonFiniteLogits as error:
            a.slot.distrust()
            self._queue.cancel(a.job.owner, a.job.slot_id, error.message, Fault.INTERNAL)
            return
        if a.done:
            self._sender.send_tree(a)
            self._queue.finish(a, a.slot.num_adopted or 0)

    def _extend_chains(self, ready: list[Active], logits: Tensor) -> None:
        """Draw one token per slot from logits [R, V] and send what is due."""
        states = [self._keeper.sampling_state(a.slot) for a in ready]
        rows = [LogitRow(state, tuple(a.draft_ids)) for a, state in zip(ready, states, strict=True)]
        try:
            drawn = draw_tokens(ready, rows, logits[: len(ready)])
        except NonFiniteLogits as error:
            self._extend_without(error, ready, logits)
            return
        for a, one in zip(ready, drawn, strict=True):
            a.take(one)
        for a in ready:
            self._sender.send_due(a)
            if a.done:
                self._queue.finish(a, a.slot.num_adopted or 0)

    def _extend_without(self, error: NonFiniteLogits, ready: list[Active], logits: Tensor) -> None:
        """Draw for the others: NaN in one slot's logits ends that proposal alone."""
        for i in error.rows:
            ready[i].slot.distrust()
            self._queue.cancel(ready[i].job.owner, ready[i].job.slot_id, error.message, Fault.INTERNAL)
        sound = [i for i in range(len(ready)) if i not in error.rows]
        if sound:
            self._extend_chains([ready[i] for i in sound], logits[sound])
