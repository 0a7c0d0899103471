"""All leases of a target: the slots that step by themselves, and the draft buffer of each ticket.

Called by `step` and `verifier` on the engine thread. Only `hand_in` is called by the servicer, on the gRPC loop's
thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outrider.engine.speculation.nodes import Delivery
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.jobs import JobError, JobFault, OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.log import get_logger, log_extra
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.lease import Lease, SlotDrafter, SlotDraftWorker
from target_service.leases.lease_jobs import ExtendJob, Verdict, VerifyJob
from target_service.leases.slot_search import Beams

log = get_logger(__name__)


class Leases:
    """Table of the leases, by slot and by ticket. A slot has at most one lease. Use it on the engine thread; other
    threads may only get the table's size and call `hand_in`.
    """

    def __init__(self, max_bytes: int, metrics: WorkerMetrics, answer: Callable[[Callable[[], None]], None]) -> None:
        """Create the table. max_bytes: maximum bytes of all draft buffers, shared equally among the leases. answer:
        function that queues the sending of an answer to a gateway until the engine thread's next flush.
        """
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._post = answer
        self._opened: dict[SlotKey, tuple[Speculation, tuple[Drafter, ...]]] = {}
        """Per open slot: its speculation settings, and the target's own drafters that its request allows."""
        self._leases: dict[SlotKey, Lease] = {}
        self._by_ticket: dict[int, Lease] = {}
        self._delivered: deque[tuple[Delivery, float]] = deque()
        self._num_bytes_handed_in = 0
        """Bytes of all deliveries that were queued so far. Only the gRPC loop's thread writes it."""
        self._num_bytes_taken = 0
        """Bytes of all deliveries that were inserted or dropped so far. Only the engine thread writes it."""
        self._acceptance: dict[tuple[Any, ...], RankAcceptance] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, key: SlotKey) -> Lease | None:
        """Return the lease of a slot; None if it has none."""
        return self._leases.get(key)

    def lease_of_ticket(self, ticket: int) -> Lease | None:
        """Return the lease to which a ticket belongs; None if it has not begun, or has ended."""
        return self._by_ticket.get(ticket)

    def may_be_drafted(self, key: SlotKey) -> bool:
        """Return whether steps of an open slot may verify draft tokens."""
        return not self.speculation_of(key).is_plain

    def speculation_of(self, key: SlotKey) -> Speculation:
        """Return the speculation settings of an open slot."""
        speculation, _ = self._opened[key]
        return speculation

    def running(self) -> list[Lease]:
        """Return the leases that may take another step."""
        return [lease for lease in self._leases.values() if lease.is_running]

    def opened(self, job: OpenJob) -> None:
        """Register a new slot and its speculation settings. If an older slot has the same key, its lease ends."""
        key = (job.owner, job.slot_id)
        self.end(key, "the slot was opened again")
        self._opened[key] = (job.speculation, job.own_drafters)

    def slots_of(self, owner: int) -> list[SlotKey]:
        """Return the keys of the open slots of the gateway stream with number `owner`."""
        return [key for key in self._opened if key[0] == owner]

    def closed(self, key: SlotKey) -> None:
        """Remove a slot, and end its lease."""
        self.end(key, "the slot was closed")
        self._opened.pop(key, None)

    def begin(self, job: VerifyJob, slot: Slot, beams: Beams | None = None) -> Lease:
        """Begin the lease of a slot, and return it. beams: the slot's beam search; None = it has none."""
        speculation, own_drafters = self._opened[slot.key]
        drafts = list[SlotDraftWorker]()
        for index, (ticket, is_drafted) in enumerate(job.tickets):
            acceptance = self._slot_acceptance(slot, index)
            drafts.append(SlotDraftWorker(Drafter.MODEL, acceptance, ticket=ticket, is_active=is_drafted))
        own_slot_drafters = dict[Drafter, SlotDrafter]()
        for drafter in own_drafters:
            if drafter.own is not None:
                own_slot_drafters[drafter.own] = SlotDrafter(drafter.own, self._slot_acceptance(slot, drafter))
        lease = Lease(job, slot, speculation, drafts, own_slot_drafters, job.arrived_s, beams)
        lease.begin_step(job.arrived_s)
        self._leases[slot.key] = lease
        for draft in drafts:
            self._by_ticket[draft.ticket] = lease
        return lease

    def _slot_acceptance(self, slot: Slot, drafter: int | Drafter) -> SlotAcceptance:
        # drafter: a draft worker's index among the tickets, or a drafter of the target's own
        params = slot.params
        width = 0
        if params.beams is not None:
            width = params.beams.width
        kind = (params.greedy, params.is_deterministic, round(params.lenience, 1), width, drafter)
        return SlotAcceptance(
            self._acceptance.setdefault(kind, RankAcceptance())
        )  # slots that sample alike begin alike

    def extend(self, job: ExtendJob, now: float) -> None:
        """Move the end of a slot's lease to a larger committed length. A job with the ticket of an earlier lease has no
        effect. now: monotonic time, in seconds.
        """
        lease = self._leases.get((job.owner, job.slot_id))
        if lease is None or lease.first.ticket != job.ticket or job.lease_end_len <= lease.job.lease_end_len:
            return
        if not lease.is_running:
            lease.ready_s = now
        lease.job = replace(lease.job, lease_end_len=job.lease_end_len)

    def hand_in(self, nodes: Delivery) -> bool:
        """Queue a delivery for the engine thread, and return True. If the queue would exceed its maximum size, drop the
        delivery and return False.

        An empty queue accepts a delivery of any size. Called on the gRPC loop's thread.
        """
        waiting = self._num_bytes_handed_in - self._num_bytes_taken
        if waiting and waiting + nodes.num_bytes > self._max_bytes:
            return False
        self._num_bytes_handed_in += nodes.num_bytes
        self._delivered.append((nodes, time.monotonic()))
        return True

    def insert_deliveries(self, *, in_step: bool = False) -> None:
        """Insert the queued deliveries into the draft buffers of their tickets. Drop those without a lease.

        in_step: whether a step is running; that step does not verify the inserted draft tokens. Deliveries without a
        lease then stay queued, since the Verify that begins it may be handled after the step.
        """
        for _ in range(len(self._delivered)):
            nodes, arrived_s = self._delivered.popleft()
            if in_step and nodes.ticket not in self._by_ticket:
                self._delivered.append((nodes, arrived_s))
            else:
                self._num_bytes_taken += nodes.num_bytes
                self._deliver(nodes, arrived_s, in_step)

    def _deliver(self, nodes: Delivery, arrived_s: float, in_step: bool) -> None:
        lease = self._by_ticket.get(nodes.ticket)
        if lease is None:
            self._metrics.count_delivered("expired", len(nodes.ids))
            return
        draft = lease.draft_of_ticket(nodes.ticket)
        if lease.beams is not None:
            inserted = lease.beams.drafts.insert(nodes)
        else:
            max_bytes = self._max_bytes // max(1, len(self._leases)) // len(lease.drafts)
            inserted = draft.buffer.insert(nodes, lease.slot.committed, max_bytes, in_step=in_step)
        draft.buffer.num_wasted += inserted.num_late
        self._metrics.count_delivered("late", inserted.num_late)
        self._metrics.count_delivered("pruned", inserted.num_dropped)
        if inserted.is_full and not self._has_warned:
            self._has_warned = True
            log.warning(
                "drafts are dropped: %d answers share %d bytes, and a draft token brings %d; let laws be cut "
                "(draft_logprobs topk:128), or free memory of the host before the target starts",
                len(self._leases),
                self._max_bytes,
                nodes.num_bytes // max(1, len(nodes.ids)),
            )
        if nodes.ids:
            draft.arrived(nodes.root_len, arrived_s)

    def refuse(self, ticket: int, why: str) -> None:
        """Record that a delivery under a ticket broke a rule. No step waits for that draft worker until its next
        delivery.

        why: the rule that it broke, for the log.
        """
        self._metrics.proposals_refused.inc()
        lease = self._by_ticket.get(ticket)
        if lease is None:
            return
        draft = lease.draft_of_ticket(ticket)
        draft.is_refused = True
        draft.is_active = False
        slot_id = lease.slot.key[1]
        log.warning("refused a delivery for slot %d: %s", slot_id, why, extra=log_extra(slot=slot_id))

    def end(self, key: SlotKey, why: str, fault: JobFault = JobFault.CANCELLED) -> None:
        """End the slot's lease, if it has one, and send an error with reason `why` and kind `fault` to the gateway that
        began the lease.
        """
        lease = self.finish(key)
        if lease is None:
            return
        if fault is JobFault.CANCELLED:
            why = f"verify cancelled: {why}"
        self.answer(lease.job, JobError(fault, why))

    def finish(self, key: SlotKey) -> Lease | None:
        """Remove the slot's lease from the table and return it; None if the slot has none. Nothing is sent to the
        gateway that began the lease.
        """
        lease = self._leases.pop(key, None)
        if lease is None:
            return None
        num_dropped = 0
        for draft in lease.drafts:
            num_dropped += len(draft.buffer.tree)
            if self._by_ticket.get(draft.ticket) is lease:
                del self._by_ticket[draft.ticket]
        self._metrics.count_delivered("pruned", num_dropped)
        return lease

    def answer(self, job: VerifyJob, result: Verdict | JobError) -> None:
        """Queue the answer to a Verify job for its gateway: a verdict, or an error that ends the lease."""
        self._post(lambda: job.respond(result))
