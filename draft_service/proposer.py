"""The draft's engine worker: every active proposal advances by one token a step; slots join and leave in between.

How a token is drawn is in `drawing.py`. Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from draft_service.active import Active, proposal_uniforms
from draft_service.drawing import draw_tokens
from draft_service.jobs import PartOut, Proposed, ProposeJob
from draft_service.looping import loop_of, may_loop, run_loops
from draft_service.sender import Sender
from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, TruncateJob
from outrider.engine.model_runner import ModelRunner
from outrider.engine.penalties import LogitRow, NonFiniteLogits
from outrider.engine.scheduler import SlotKey
from outrider.engine.slot_keeper import SlotKeeper
from outrider.engine.slots import Slot
from outrider.engine.turns import Turns
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics


class Proposer:
    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        engine: EngineThread,
        deliver: Callable[[PartOut], None],
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        full_logprobs_budget_bytes: int,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._engine = engine
        self._sender = Sender(engine, deliver)
        self._metrics = metrics
        self._loop = loop_of(runner)
        self._turns = Turns(keeper.table, runner.pool, metrics, max_prefill_tokens)
        self._full_budget_bytes = full_logprobs_budget_bytes
        self._active: dict[SlotKey, Active] = {}
        self._routes: dict[SlotKey, tuple[str, int]] = {}

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case ProposeJob():
                self._propose(job)
            case OpenJob():
                self._cancel(job.owner, job.slot_id, "the slot was opened again")
                if self._keeper.open(job) is not None:
                    self._routes[job.owner, job.slot_id] = (job.deliver_to, job.target_epoch)
            case TruncateJob():
                self._keeper.truncate(job)  # a proposal under way feeds again what this drops
            case CloseJob():
                self._cancel(job.owner, job.slot_id, "the slot was closed")
                self._routes.pop((job.owner, job.slot_id), None)
                self._keeper.close(job)
            case OwnerGone():
                for key in [key for key in self._routes if key[0] == job.owner]:
                    self._cancel(*key, "the gateway's stream ended")
                    del self._routes[key]
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _propose(self, job: ProposeJob) -> None:
        self._cancel(job.owner, job.slot_id, "a newer propose came for the slot")
        slot = self._keeper.commit(job.owner, job.slot_id, job.base_len, job.committed_ids)
        if isinstance(slot, JobError):
            self._answer(job, slot)
            return
        room = slot.max_len - len(slot.committed) - 1
        if not 1 <= job.num_draft_tokens <= room:
            message = f"num_draft_tokens is {job.num_draft_tokens}, must be from 1 to {room} here"
            self._answer(job, JobError(Fault.INVALID, message))
            return
        deliver_to, target_epoch = self._routes[job.owner, job.slot_id]
        active = Active(job, slot, deliver_to, target_epoch, self._cut(job, slot), proposal_uniforms(job, slot))
        self._active[job.owner, job.slot_id] = active

    def _cut(self, job: ProposeJob, slot: Slot) -> int | None:
        """`auto`: whole laws while a step's payload over all its slots stays under the budget."""
        if slot.params.determined or job.encoding is DraftLogprobs.FULL:
            return None
        if job.encoding is DraftLogprobs.TOPK:
            return job.topk
        num_full = 1 + sum(1 for a in self._active.values() if not a.determined and a.topk is None)
        return None if num_full * self._runner.facts.vocab_size * 4 <= self._full_budget_bytes else job.topk

    def _cancel(self, owner: int, slot_id: int, why: str, fault: Fault = Fault.CANCELLED) -> None:
        active = self._active.pop((owner, slot_id), None)
        if active is not None:
            self._answer(active.job, JobError(fault, f"propose cancelled: {why}"))

    def _answer(self, job: ProposeJob, result: JobError) -> None:
        self._engine.answer(lambda: job.respond(result))

    # steps

    def next_wake(self) -> float | None:
        return self._turns.next_wake(time.monotonic())

    def step(self, now: float) -> bool:
        """One token for every active proposal whose prompt is in, and pieces of the others' prompts beside them."""
        if not self._active and not self._turns.num_starved:
            return False
        wishes = {key: a.wish(self._loop is not None and may_loop(a)) for key, a in self._active.items()}
        turn = self._turns.take(wishes, now, feed_all=False)
        if not turn.running and not turn.pieces:
            return turn.worked
        for key, a in self._active.items():
            if a.started_s is None and key not in turn.starved:
                a.started_s = now
        num_looped = self._run_loops([self._active[key] for key in turn.running])
        ready = [self._active[key] for key in turn.running if key in self._active]
        rows = [a.row() for a in ready]
        if rows or turn.pieces:
            logits = self._runner.forward([*rows, *(p.row for p in turn.pieces)])  # [R, V] float32
            for piece in turn.pieces:
                self._active[piece.slot.key].num_fed += piece.row.num_new
            for a, row in zip(ready, rows, strict=True):
                a.fed(row)
            if ready:
                self._extend(ready, logits)
        seconds = time.monotonic() - now
        self._turns.done(turn, sum(row.num_new for row in rows) + num_looped, seconds)
        self._metrics.batch_size.observe(len(turn.running) + len(turn.pieces))
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    def fail_step(self, error: Exception) -> None:
        """The slots' caches cannot be trusted any more: the gateway opens them again."""
        for a in list(self._active.values()):
            self._cancel(a.job.owner, a.job.slot_id, f"the draft's step failed: {error}", Fault.INTERNAL)
            a.slot.distrust()
            self._keeper.close(CloseJob(a.job.owner, a.job.slot_id))

    def _extend(self, ready: list[Active], logits: Tensor) -> None:
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
                self._finish(a)

    def _run_loops(self, running: list[Active]) -> int:
        """Makes and sends whole proposals where the path can; returns the tokens that were fed for them."""
        whole = [a for a in running if may_loop(a)] if self._loop is not None else []
        if self._loop is None or not whole:
            return 0
        num_fed = 0
        for a, drawn in run_loops(self._loop, whole):
            num_fed += a.num_fed + a.job.num_draft_tokens - 1
            if drawn is None:
                a.slot.distrust()
                self._cancel(a.job.owner, a.job.slot_id, NonFiniteLogits([0]).message, Fault.INTERNAL)
                continue
            for one in drawn:
                a.take(one)
            self._sender.send_due(a)
            self._finish(a)
        return num_fed

    def _extend_without(self, error: NonFiniteLogits, ready: list[Active], logits: Tensor) -> None:
        """NaN in one slot's logits ends that proposal alone."""
        for i in error.rows:
            ready[i].slot.distrust()
            self._cancel(ready[i].job.owner, ready[i].job.slot_id, error.message, Fault.INTERNAL)
        sound = [i for i in range(len(ready)) if i not in error.rows]
        if sound:
            self._extend([ready[i] for i in sound], logits[sound])

    def _finish(self, a: Active) -> None:
        now = time.monotonic()
        started = now if a.started_s is None else a.started_s
        a.slot.asked_s = now  # it is asked again when the target has verified
        del self._active[a.job.owner, a.job.slot_id]
        self._metrics.steps.labels(kind="propose").inc()
        num_cached = a.slot.num_adopted or 0

        def reply() -> None:  # behind the parts, which by then say how large they are
            payload = a.payload
            self._metrics.wire_bytes.labels(encoding=payload.encoding).inc(payload.num_bytes)
            result = Proposed(
                draft_ids=tuple(a.draft_ids),
                queue_s=started - a.job.arrived_s,
                compute_s=now - started,
                payload_bytes=payload.num_bytes,
                encoding=payload.encoding,
                num_fed_tokens=a.num_fed,
                num_cached_tokens=num_cached,
            )
            a.job.respond(result)

        self._engine.answer(reply)
