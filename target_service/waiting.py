"""Verifies that have arrived and not been answered, and which of them are ready. On the engine thread.

A slot waits for its proposal at most its budget, and those that are ready do not wait for it, but for as long as a step
for all saves more than that (`target_service.returning`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.engine.sampling.chain import Chain
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.tree_acceptance import DraftTree
from outrider.engine.sampling.wire_tensors import decode_laws
from outrider.engine.worker.jobs import Fault, JobError, SlotKey
from outrider.engine.worker.scheduler import StepRequest, Want
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.log import about, get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from target_service.jobs import Fallback, VerifyJob
from target_service.tickets import Proposal, TicketTable

log = get_logger(__name__)

ALL = -1e-6
"""A log-prob that is 0 but for rounding."""


@dataclass(slots=True)
class Waiting:
    """A verify that has arrived and not been answered."""

    job: VerifyJob
    slot: Slot
    proposal: Proposal | None
    """None for a plain step, and where the drafts are made here."""
    num_own: int = 0
    """Most tokens that are drafted here."""
    runnable_s: float | None = None
    """When its slot had memory and all committed tokens but the last were fed: the wait budget runs from here."""
    with_drafts: bool = False
    """The proposal is complete: decided when the verify was found ready, since it may complete at any time."""

    is_crowded_out: bool = False
    """Other drafts fill the step: it goes plain."""

    @property
    def num_drafts(self) -> int:
        """Tokens asked for, whatever the drafts say: who goes plain must not depend on that."""
        return self.job.num_draft_tokens if self.with_drafts else self.num_own


@dataclass(frozen=True)
class ReadyVerify:
    """A verify that goes into the next forward."""

    waiting: Waiting
    draft_ids: list[int]
    draft_laws: list[RowLaw] | None
    """What each of draft_ids was drawn from, of a tree what the children of each of its inner nodes were; None where
    that does not matter, and for plain.
    """
    fallback: Fallback | None
    tree: DraftTree | None = None
    """None for a chain."""

    @property
    def slot(self) -> Slot:
        return self.waiting.slot

    @cached_property
    def copied(self) -> bool:
        """A chain drafted without a choice, which is kept where the target draws the same: as often as by the other
        rules, and exact even where it was copied from what the same noise once said.
        """
        laws = self.draft_laws
        if not laws or self.tree is not None or self.slot.params.lenience < 1.0:
            return False
        return all(law.score(token_id) >= ALL for law, token_id in zip(laws, self.draft_ids, strict=True))

    def noise_rounds(self, count: int) -> Sequence[int]:
        """What its noise after 0, 1, ... drafts is keyed by beside the position: the round; of what is copied, which
        knows no rounds like plain steps, the position again.
        """
        start = len(self.slot.committed)
        return range(start, start + count) if self.copied else [start] * count


class WaitingRoom:
    """At most one verify a slot. `cancelled(job, error)` answers those that will never run; `draft(slot, count)` makes
    the drafts of those that are drafted for here.
    """

    def __init__(
        self,
        tickets: TicketTable,
        metrics: WorkerMetrics,
        vocab_size: int,
        cancelled: Callable[[VerifyJob, JobError], None],
        draft: Callable[[Slot, int], Chain],
        no_trees: str | None,
    ) -> None:
        """no_trees: why the model verifies chains alone; None when it does not."""
        self._tickets = tickets
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._cancelled = cancelled
        self._draft = draft
        self._no_trees = no_trees
        self._waiting: dict[SlotKey, Waiting] = {}

    def add(self, job: VerifyJob, slot: Slot) -> None:
        """`slot` has been brought to the committed tokens of the job."""
        proposal, now = None, time.monotonic()
        if job.num_draft_tokens:
            proposal = self._tickets.expect(job.ticket, len(slot.committed), job.num_draft_tokens, now)
        num_own = min(job.num_own_draft_tokens, _room(slot))
        runnable_s = None if needs_prefill(slot) else now
        self._waiting[job.owner, job.slot_id] = Waiting(job, slot, proposal, num_own, runnable_s)

    def cancel(
        self, owner: int, slot_id: int, why: str, fault: Fault = Fault.CANCELLED, keep_ticket: int | None = None
    ) -> None:
        """Answer the slot's verify, if there is one, with an error. `keep_ticket`: a repeated verify still wants it."""
        waiting = self._waiting.pop((owner, slot_id), None)
        if waiting is None:
            return
        if waiting.job.ticket != keep_ticket:
            self._finish_ticket(waiting, "cancelled")
        self._cancelled(waiting.job, JobError(fault, why))

    def cancel_owner(self, owner: int, why: str) -> None:
        for key in [key for key in self._waiting if key[0] == owner]:
            self.cancel(*key, why)

    def done(self, ready: ReadyVerify) -> None:
        """Its verdict is on its way."""
        job = ready.waiting.job
        del self._waiting[job.owner, job.slot_id]
        self._finish_ticket(ready.waiting, None if ready.fallback is None else ready.fallback.name.lower())

    def _finish_ticket(self, waiting: Waiting, unused: str | None) -> None:
        if waiting.proposal is not None:
            self._tickets.finish(waiting.proposal.ticket, unused)

    def next_wake(self) -> float | None:
        """The earliest end of a wait budget, or of a parked proposal's life."""
        times = [w.runnable_s + w.job.wait_budget_s for w in self._waiting.values() if w.runnable_s is not None]
        expiry = self._tickets.next_expiry()
        return min([*times, *([] if expiry is None else [expiry])], default=None)

    def ready_s(self, key: SlotKey) -> float | None:
        """When the slot's verify could go as it should, with its drafts or plain; None: not yet, or there is none."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return None
        arrived_s, proposal = waiting.job.arrived_s, waiting.proposal
        if proposal is None or proposal.refused is not None or proposal.gone:
            return arrived_s
        return None if proposal.completed_s is None else max(arrived_s, proposal.completed_s)

    def step_requests(self, now: float) -> dict[SlotKey, StepRequest]:
        """What each slot with a verify would do now."""
        self._tickets.expire(now)
        return {key: self._wish(waiting, now) for key, waiting in self._waiting.items()}

    def take(self, keys: Iterable[SlotKey], most_drafts: int) -> list[ReadyVerify]:
        """Return those that go now, each with its drafts or without: at most most_drafts tokens, the shortest first."""
        taken = [self._waiting[key] for key in keys]
        for waiting in sorted(taken, key=lambda waiting: waiting.num_drafts):
            if waiting.num_drafts > most_drafts:
                waiting.is_crowded_out = True
            most_drafts -= 0 if waiting.is_crowded_out else waiting.num_drafts
        return [self._ready(waiting) for waiting in taken]

    def not_runnable(self, keys: Iterable[SlotKey]) -> None:
        """These slots have no memory: their wait budgets begin when they have."""
        for key in keys:
            if key in self._waiting:
                self._waiting[key].runnable_s = None

    def _wish(self, waiting: Waiting, now: float) -> StepRequest:
        slot, proposal = waiting.slot, waiting.proposal
        num_committed = len(slot.committed)
        if needs_prefill(slot):
            return StepRequest(Want.PREFILL, num_committed + waiting.job.num_draft_tokens + waiting.num_own)
        if waiting.runnable_s is None:
            waiting.runnable_s = now
        if proposal is None or proposal.refused is not None:
            waiting.with_drafts = False
            return StepRequest(Want.STEP, num_committed + waiting.num_own)
        waiting.with_drafts = proposal.complete
        if waiting.with_drafts:
            return StepRequest(Want.STEP, num_committed + proposal.num_draft_tokens)
        if proposal.gone or now >= waiting.runnable_s + waiting.job.wait_budget_s:
            return StepRequest(Want.STEP, num_committed)
        return StepRequest(Want.PREFILL, num_committed + waiting.job.num_draft_tokens)

    def _ready(self, waiting: Waiting) -> ReadyVerify:
        proposal = waiting.proposal
        if waiting.is_crowded_out:
            return ReadyVerify(waiting, [], None, None)
        if waiting.num_own:
            chain = self._draft(waiting.slot, waiting.num_own)
            return ReadyVerify(waiting, chain.ids, chain.laws, None)
        if proposal is None:
            return ReadyVerify(waiting, [], None, None)
        if waiting.with_drafts:
            return self._with_drafts(waiting, proposal)
        if proposal.refused is not None:
            return self._refused(waiting, proposal.refused)
        return ReadyVerify(waiting, [], None, Fallback.LATE)

    def _refused(self, waiting: Waiting, why: str) -> ReadyVerify:
        slot_id = waiting.job.slot_id
        log.warning("refused a proposal for slot %d: %s", slot_id, why, extra=about(slot=slot_id))
        self._metrics.proposals_refused.inc()
        return ReadyVerify(waiting, [], None, Fallback.REFUSED)

    def _with_drafts(self, waiting: Waiting, proposal: Proposal) -> ReadyVerify:
        try:
            return self._checked(waiting, proposal)
        except BadTensor as error:
            self._tickets.reject(proposal, str(error))
            return self._refused(waiting, str(error))

    def _checked(self, waiting: Waiting, proposal: Proposal) -> ReadyVerify:
        """Raises BadTensor for a proposal that cannot be verified."""
        slot, draft_ids = waiting.slot, list(proposal.draft_ids)
        if not draft_ids:  # the draft has nothing to say here
            return ReadyVerify(waiting, [], None, None)
        tree = self._tree(proposal, slot) if proposal.parents else None
        room = _room(slot)
        depth = len(draft_ids) if tree is None else max(map(len, tree.paths))
        if depth > room:
            raise BadTensor(f"{depth} draft tokens after each other, room for {room} before max_tokens")
        if slot.params.determined:
            return ReadyVerify(waiting, draft_ids, None, None, tree)
        if not proposal.rows:
            raise BadTensor("distributions are missing, and acceptance is by rejection at a temperature above 0")
        drafted = [[token_id] for token_id in draft_ids] if tree is None else tree.child_ids()
        num_rows = sum(rows.num_rows for rows in proposal.rows)
        if num_rows != len(drafted):
            raise BadTensor(f"{num_rows} distributions for the children of {len(drafted)} nodes: one each, in one part")
        start, laws = 0, list[RowLaw]()
        for rows in proposal.rows:
            laws.extend(decode_laws(rows, self._vocab_size, drafted[start : start + rows.num_rows]))
            start += rows.num_rows
        return ReadyVerify(waiting, draft_ids, laws, None, tree)

    def _tree(self, proposal: Proposal, slot: Slot) -> DraftTree:
        """Raises BadTensor."""
        if self._no_trees is not None:
            raise BadTensor(f"the proposal is a tree, and this target verifies chains alone: {self._no_trees}")
        if slot.params.lenience < 1.0:
            raise BadTensor(f"the proposal is a tree, and lenience is {slot.params.lenience:g}: trees are exact")
        if len(slot.committed) + len(proposal.draft_ids) > slot.most_cached:
            raise BadTensor(f"a tree of {len(proposal.draft_ids)} nodes has no room in the cache beside the sequence")
        try:
            return DraftTree.checked(proposal.draft_ids, proposal.parents)
        except ValueError as error:
            raise BadTensor(str(error)) from None


def _room(slot: Slot) -> int:
    """Draft tokens that a round may use: it commits one more than it accepts."""
    return slot.max_len - len(slot.committed) - 1
