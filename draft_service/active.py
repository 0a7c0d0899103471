"""A proposal being drafted: what it has so far, and what it will draw with.

What a draft does with messages, with a model or without: which proposals are asked for, and what becomes of them.

On the engine thread. The proposer makes what is in `active`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from draft_service.jobs import Proposed, ProposeJob
from draft_service.tree_growth import Growth, tree_row
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.scheduler import StepRequest, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot, Slot
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics

FULL_LOGPROBS_BUDGET_BYTES = 4 << 20
"""`auto` sends whole laws while a step's payload over all its slots stays under this. Twice as much: so is the
wire's share."""


class Drawn(NamedTuple):
    """A token of a proposal."""

    token_id: int
    law: RowLaw | None
    """What it was drawn from; None where proposals are ids alone."""
    chance: float | None = None
    """Its probability under the draft, of a proposal that may end for want of confidence."""


@dataclass(slots=True)
class Payload:
    """How much of a proposal has left, and in what form. Of the gRPC loop's thread, on which it leaves."""

    num_bytes: int = 0
    encoding: str = "ids"


@dataclass(slots=True)
class Asked:
    """A proposal that was asked for, with a model or without."""

    job: ProposeJob
    slot: BareSlot
    deliver_to: str
    target_epoch: int
    topk: int | None
    """Cut each law to this many best tokens before drawing; None = the whole law."""
    draft_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Of a tree, which is here when it is grown: as many as draft_ids."""
    unsent: list[RowLaw] = field(default_factory=list)
    """What drafted tokens that have not been sent yet were drawn from."""
    num_sent: int = 0
    payload: Payload = field(default_factory=Payload)
    started_s: float | None = None
    num_fed: int = 0
    length: int | None = None
    """Tokens that it ends with, once that is known to be before all that were asked for."""
    confidence: float = 1.0
    """Probability under the draft of all its tokens, of one that is `watched`."""

    @property
    def watched(self) -> bool:
        """It ends where the draft is no longer confident of it. One that is accepted by rejection never does: when it
        is complete would depend on what was drawn, and what is late is not verified, so that some tokens were favoured.
        """
        return self.job.min_confidence > 0.0 and self.determined

    @property
    def position(self) -> int:
        """Of its next token in the sequence."""
        return len(self.slot.committed) + len(self.draft_ids)

    @property
    def determined(self) -> bool:
        """Its tokens are guesses of what the target says, and travel as ids alone."""
        return self.slot.params.determined

    @property
    def most_laws(self) -> int:
        """That a step may add to what is sent."""
        return 1 if self.job.tree is None else self.job.tree.most_parents

    @property
    def done(self) -> bool:
        return len(self.draft_ids) >= self.num_announced

    @property
    def num_announced(self) -> int:
        """Tokens that it will have, as far as is known."""
        return self.job.num_draft_tokens if self.length is None else self.length

    def take(self, drawn: Drawn) -> None:
        """Its next token, with which it may end."""
        self.draft_ids.append(drawn.token_id)
        if drawn.law is not None:
            self.unsent.append(drawn.law)
        if drawn.chance is not None:
            self.confidence *= drawn.chance
            if self.confidence < self.job.min_confidence:
                self.length = len(self.draft_ids)

    def leave(self) -> None:
        """It is over, complete or not."""


@dataclass(slots=True)
class Active(Asked):
    """One that a model makes."""

    slot: Slot
    uniforms: list[float] = field(init=False)
    """One per token of a chain to draft; empty where it is not drawn."""
    growth: Growth | None = field(init=False)
    """Of a tree, until it is grown."""

    def __post_init__(self) -> None:
        self.uniforms = proposal_uniforms(self.job, self.slot)
        tree = self.job.tree
        shape = None if tree is None else tree.fitted(tree.depth, self.job.num_draft_tokens)
        self.growth = None if shape is None else Growth(shape)

    def step_request(self) -> StepRequest:
        """Its next token; to begin at all it wants room for the whole proposal."""
        wants_all = not self.slot.table.blocks
        num_next = len(self.draft_ids if self.growth is None else self.growth.fed)
        num_guesses = self.job.num_draft_tokens if wants_all else num_next
        return StepRequest(Want.STEP, len(self.slot.committed) + num_guesses)

    def row(self) -> Row:
        """Its share of the next forward: all committed tokens and guesses that are not cached yet."""
        if self.growth is not None:
            return tree_row(self.slot, self.growth)
        slot, num_cached = self.slot, len(self.slot.cached)
        num_committed = len(slot.committed)
        new_ids = [*slot.committed[num_cached:], *self.draft_ids[max(0, num_cached - num_committed) :]]
        return Row(slot.table, new_ids, num_cached, 1, slot.cached)

    def fed(self, row: Row) -> None:
        """`row` has been through the model. What came before the first draft token was catching up."""
        self.slot.fed(row.new_ids)
        has_begun = self.draft_ids if self.growth is None else self.growth.nodes
        self.num_fed += 0 if has_begun else row.num_new

    def take_tree(self) -> None:
        """It is grown."""
        assert self.growth is not None, "no tree grows here"
        tree, laws = self.growth.tree()
        self.draft_ids, self.parents, self.unsent = list(tree.ids), list(tree.parents), list(laws)
        self.length, self.growth = len(self.draft_ids), None

    def leave(self) -> None:
        """A tree's nodes lie in the cache side by side, as in no sequence: what is accepted of them is fed again."""
        if self.job.tree is not None:
            self.slot.forget_guesses()


def proposal_uniforms(job: ProposeJob, slot: Slot) -> list[float]:
    """What each token of the proposal will be drawn with."""
    if slot.params.determined or job.tree is not None:
        return []
    start, count = len(slot.committed), job.num_draft_tokens
    params, rounds = [slot.params] * count, [start] * count
    return host_slot_uniforms(params, rounds, range(start, start + count), [Purpose.DRAFT])[0].tolist()


A = TypeVar("A", bound=Asked)


class ProposalQueue(Generic[A]):
    """At most one proposal a slot."""

    def __init__(
        self,
        keeper: SlotKeeper[Any],
        engine: EngineThread,
        metrics: WorkerMetrics,
        vocab_size: int,
        make: Callable[..., A],
        no_trees: str | None = "it has no model to grow them with",
    ) -> None:
        """make(job, slot, deliver_to, target_epoch, topk). no_trees: why it makes chains alone; None when trees too."""
        self.active: dict[SlotKey, A] = {}
        self._keeper = keeper
        self._engine = engine
        self._metrics = metrics
        self._vocab_size = vocab_size
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
        return None if num_full * self._vocab_size * 4 <= FULL_LOGPROBS_BUDGET_BYTES else job.topk

    def _answer(self, job: ProposeJob, result: JobError) -> None:
        self._engine.answer(lambda: job.respond(result))
