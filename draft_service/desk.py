"""What a draft does with messages, with a model or without: which proposals are asked for, and what becomes of them.

On the engine thread. The proposer makes what is in `active`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from draft_service.active import Asked
from draft_service.jobs import Proposed, ProposeJob
from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, TruncateJob
from outrider.engine.open_slots import BareSlot
from outrider.engine.scheduler import SlotKey
from outrider.engine.slot_keeper import SlotKeeper
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics

A = TypeVar("A", bound=Asked)


class Desk(Generic[A]):
    """At most one proposal a slot."""

    def __init__(
        self,
        keeper: SlotKeeper[Any],
        engine: EngineThread,
        metrics: WorkerMetrics,
        vocab_size: int,
        full_logprobs_budget_bytes: int,
        make: Callable[..., A],
        no_trees: str | None = "it has no model to grow them with",
    ) -> None:
        """make(job, slot, deliver_to, target_epoch, topk). no_trees: why it makes chains alone; None when trees too."""
        self.active: dict[SlotKey, A] = {}
        self._keeper = keeper
        self._engine = engine
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._full_budget_bytes = full_logprobs_budget_bytes
        self._make = make
        self._no_trees = no_trees
        self._routes: dict[SlotKey, tuple[str, int]] = {}

    def handle(self, job: object) -> None:
        match job:
            case ProposeJob():
                self._propose(job)
            case OpenJob():
                self.cancel(job.owner, job.slot_id, "the slot was opened again")
                if self._keeper.open(job) is not None:
                    self._routes[job.owner, job.slot_id] = (job.deliver_to, job.target_epoch)
            case TruncateJob():
                self._keeper.truncate(job)  # a proposal under way feeds again what this drops
            case CloseJob():
                self.cancel(job.owner, job.slot_id, "the slot was closed")
                self._routes.pop((job.owner, job.slot_id), None)
                self._keeper.close(job)
            case OwnerGone():
                for key in [key for key in self._routes if key[0] == job.owner]:
                    self.cancel(*key, "the gateway's stream ended")
                    del self._routes[key]
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def cancel(self, owner: int, slot_id: int, why: str, fault: Fault = Fault.CANCELLED) -> None:
        asked = self.active.pop((owner, slot_id), None)
        if asked is not None:
            asked.leave()
            self._answer(asked.job, JobError(fault, f"propose cancelled: {why}"))

    def finish(self, asked: A, num_cached_tokens: int = 0) -> None:
        """It is complete, and its last part is on its way."""
        now = time.monotonic()
        started = now if asked.started_s is None else asked.started_s
        asked.leave()
        asked.slot.asked_s = now  # it is asked again when the target has verified
        del self.active[asked.job.owner, asked.job.slot_id]
        self._metrics.steps.labels(kind="propose").inc()

        def reply() -> None:  # behind the parts, which by then say how large they are
            payload = asked.payload
            self._metrics.wire_bytes.labels(encoding=payload.encoding).inc(payload.num_bytes)
            result = Proposed(
                draft_ids=tuple(asked.draft_ids),
                queue_s=started - asked.job.arrived_s,
                compute_s=now - started,
                payload_bytes=payload.num_bytes,
                encoding=payload.encoding,
                num_fed_tokens=asked.num_fed,
                num_cached_tokens=num_cached_tokens,
            )
            asked.job.respond(result)

        self._engine.answer(reply)

    def _propose(self, job: ProposeJob) -> None:
        self.cancel(job.owner, job.slot_id, "a newer propose came for the slot")
        slot = self._keeper.commit(job.owner, job.slot_id, job.base_len, job.committed_ids)
        if isinstance(slot, JobError):
            self._answer(job, slot)
            return
        wrong = self._wrong(job, slot)
        if wrong is not None:
            self._answer(job, JobError(Fault.INVALID, wrong))
            return
        topk = None if slot.params.determined else self._cut(job)
        self.active[job.owner, job.slot_id] = self._make(job, slot, *self._routes[job.owner, job.slot_id], topk)

    def _wrong(self, job: ProposeJob, slot: BareSlot) -> str | None:
        """Why the proposal cannot be made; None when it can."""
        num_committed, most = len(slot.committed), job.num_draft_tokens
        room = slot.max_len - num_committed - 1
        if job.tree is None:
            return None if 1 <= most <= room else f"num_draft_tokens is {most}, must be from 1 to {room} here"
        if self._no_trees is not None:
            return f"tree is {job.tree}, and this draft proposes chains alone: {self._no_trees}"
        if job.tree.depth > room:
            return f"tree is {job.tree}, must be at most {room} deep here"
        if num_committed + most > slot.most_cached:
            return f"num_draft_tokens is {most}, the cache has room for {slot.most_cached - num_committed} nodes here"
        return None

    def _cut(self, job: ProposeJob) -> int | None:
        """`auto`: whole laws while a step's payload over all its slots stays under the budget."""
        if job.encoding is DraftLogprobs.FULL:
            return None
        if job.encoding is DraftLogprobs.TOPK:
            return job.topk
        num_full = 1 if job.tree is None else job.tree.most_parents
        num_full += sum(a.most_laws for a in self.active.values() if not a.determined and a.topk is None)
        return None if num_full * self._vocab_size * 4 <= self._full_budget_bytes else job.topk

    def _answer(self, job: ProposeJob, result: JobError) -> None:
        self._engine.answer(lambda: job.respond(result))
