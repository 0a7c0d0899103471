"""Proposals on their way to a verify. Filled by the gRPC loop, emptied by the engine, hence the one lock.

A ticket is made by the gateway and names a round; nobody can guess one. Early proposals are parked, bounded in count,
bytes and time; late and broken ones are dropped and counted. Where there is no room, the one that was parked longest
gives way: so a draft that fills the table with what nobody asked for takes no room from those that a verify awaits.
Nothing here touches tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from outrider.wire.transport.codec import Rows

MAX_PARKED_TICKETS = 1024
"""Proposals that may wait for their verify. Twice as many: one draft of many can fill twice as much."""
PARKED_TTL_S = 10.0
"""A proposal that no verify asked for is dropped after this. Twice as much: its bytes are held twice as long."""
NUM_REMEMBERED = 4096
"""Finished tickets remembered, so that what comes for them is known to be late rather than early."""


class Arrival(Enum):
    """What became of a delivery."""

    TAKEN = "taken"
    COMPLETE = "complete"
    LATE = "late"
    REFUSED = "refused"
    OVERFLOW = "overflow"


@dataclass(slots=True)
class Proposal:
    """What has arrived under one ticket."""

    ticket: int
    created_s: float
    committed_len: int = 0
    num_draft_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Of a tree, as many as draft_ids; none of a chain."""
    rows: list[Rows] = field(default_factory=list)
    num_bytes: int = 0
    refused: str | None = None
    expected: tuple[int, int] | None = None
    """(committed_len, num_draft_tokens) of the verify, once it is here."""
    gone: bool = False
    """The ticket was finished before its verify came (expired, or no room): nothing more will arrive."""
    completed_s: float | None = None

    @property
    def complete(self) -> bool:
        return self.completed_s is not None


@dataclass(frozen=True, slots=True)
class DeliveryPart:
    """One delivery, translated and range-checked by the servicer."""

    ticket: int
    committed_len: int
    start: int
    draft_ids: tuple[int, ...]
    num_draft_tokens: int
    rows: Rows | None
    num_bytes: int
    parents: tuple[int, ...] = ()
    """Of a tree, as many as draft_ids; none of a chain."""


class TicketTable:
    """`on_drop(why, num_tokens)` is called for draft tokens that no verify will see.

    A complete proposal never changes until the engine finishes or rejects it: the engine reads it without the lock.
    """

    def __init__(
        self,
        max_tickets: int,
        max_bytes: int,
        ttl_s: float,
        on_drop: Callable[[str, int], None] = lambda why, num_tokens: None,
    ) -> None:
        self._max_tickets = max_tickets
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Proposal] = OrderedDict()
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._num_bytes = 0
        self._on_drop = on_drop

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    # gRPC loop

    def deliver(self, part: DeliveryPart, now: float) -> Arrival:
        """Take one part in. Parts of a ticket must come in order and agree with each other and with the verify; a later
        one may say that there will be fewer tokens than was announced.
        """
        with self._lock:
            arrival = self._deliver(part, now)
            if arrival not in (Arrival.TAKEN, Arrival.COMPLETE):
                self._drop(arrival.value, len(part.draft_ids))
            return arrival

    def refuse(self, ticket: int, reason: str, num_tokens: int, now: float) -> None:
        """A delivery that the servicer could not even translate: the verify must not wait for its budget."""
        with self._lock:
            self._drop(Arrival.REFUSED.value, num_tokens)
            if ticket in self._finished:
                return
            proposal = self._find_or_open(ticket, now)
            if proposal is not None and not proposal.complete:
                self._refuse(proposal, reason)

    def _deliver(self, part: DeliveryPart, now: float) -> Arrival:
        if part.ticket in self._finished:
            return Arrival.LATE
        proposal = self._find_or_open(part.ticket, now)
        if proposal is None:
            return Arrival.OVERFLOW
        if proposal.refused is not None or proposal.complete:
            return Arrival.REFUSED
        while self._num_bytes + part.num_bytes > self._max_bytes and self._evict_oldest(proposal):
            pass
        if self._num_bytes + part.num_bytes > self._max_bytes:
            return self._refuse(proposal, "parked proposals exceed their memory limit", Arrival.OVERFLOW)
        wrong = _wrong(proposal, part)
        return self._append(proposal, part, now) if wrong is None else self._refuse(proposal, wrong)

    def _find_or_open(self, ticket: int, now: float) -> Proposal | None:
        """None when verifies await all that there is room for; the ticket is then finished, so that its own does not
        wait for it.
        """
        proposal = self._open.get(ticket)
        if proposal is None:
            self._expire(now)
            if len(self._open) >= self._max_tickets and not self._evict_oldest():
                self._remember(ticket)
                return None
            proposal = self._open[ticket] = Proposal(ticket, now)
        return proposal

    def _append(self, proposal: Proposal, part: DeliveryPart, now: float) -> Arrival:
        proposal.committed_len, proposal.num_draft_tokens = part.committed_len, part.num_draft_tokens
        proposal.draft_ids.extend(part.draft_ids)
        proposal.parents.extend(part.parents)
        if part.rows is not None:
            proposal.rows.append(part.rows)
        proposal.num_bytes += part.num_bytes
        self._num_bytes += part.num_bytes
        if len(proposal.draft_ids) == proposal.num_draft_tokens:
            proposal.completed_s = now
            return Arrival.COMPLETE
        return Arrival.TAKEN

    # engine thread

    def expect(self, ticket: int, committed_len: int, num_draft_tokens: int, now: float) -> Proposal:
        """A verify has come for this ticket. The proposal may be here already."""
        with self._lock:
            proposal = self._open.get(ticket)
            if proposal is None:
                proposal = self._open[ticket] = Proposal(ticket, now, gone=ticket in self._finished)
            proposal.expected = (committed_len, num_draft_tokens)
            if proposal.draft_ids or proposal.complete:
                wrong = _mismatch(proposal.expected, proposal.committed_len, proposal.num_draft_tokens)
                if wrong is not None:
                    self._refuse(proposal, wrong)
            return proposal

    def reject(self, proposal: Proposal, reason: str) -> None:
        """The engine found what only tensors show: the proposal is dropped and counted."""
        with self._lock:
            self._refuse(proposal, reason)

    def finish(self, ticket: int, unused: str | None = None) -> None:
        """The round is over: release what is held; whatever comes later is late. `unused`: why no verify saw it."""
        with self._lock:
            proposal = self._open.pop(ticket, None)
            if proposal is not None:
                if unused is not None:
                    self._drop(unused, len(proposal.draft_ids))
                self._release(proposal)
            self._remember(ticket)

    def next_expiry(self) -> float | None:
        """Monotonic time at which the oldest parked proposal expires; None when none is parked."""
        with self._lock:
            parked = [p.created_s for p in self._open.values() if p.expected is None]
            return min(parked) + self._ttl_s if parked else None

    def expire(self, now: float) -> None:
        """Drop proposals that no verify asked for within the time to live."""
        with self._lock:
            self._expire(now)

    # under the lock

    def _refuse(self, proposal: Proposal, reason: str, arrival: Arrival = Arrival.REFUSED) -> Arrival:
        self._drop(arrival.value, len(proposal.draft_ids))
        self._release(proposal)
        proposal.refused = reason
        return arrival

    def _evict_oldest(self, keep: Proposal | None = None) -> bool:
        """Of those that no verify has asked for; never `keep`. False when there is none."""
        for proposal in self._open.values():
            if proposal.expected is None and proposal is not keep:
                self._forget(proposal, Arrival.OVERFLOW.value)
                return True
        return False

    def _expire(self, now: float) -> None:
        old = [p for p in self._open.values() if p.expected is None and now - p.created_s >= self._ttl_s]
        for proposal in old:
            self._forget(proposal, "expired")

    def _forget(self, proposal: Proposal, why: str) -> None:
        """One that was parked. Its verify, should it come, need not wait."""
        self._drop(why, len(proposal.draft_ids))
        del self._open[proposal.ticket]
        self._release(proposal)
        self._remember(proposal.ticket)

    def _remember(self, ticket: int) -> None:
        self._finished[ticket] = None
        while len(self._finished) > NUM_REMEMBERED:
            self._finished.popitem(last=False)

    def _release(self, proposal: Proposal) -> None:
        self._num_bytes -= proposal.num_bytes
        proposal.num_bytes = 0
        proposal.draft_ids.clear()
        proposal.parents.clear()
        proposal.rows.clear()

    def _drop(self, why: str, num_tokens: int) -> None:
        if num_tokens:
            self._on_drop(why, num_tokens)


def _wrong(proposal: Proposal, part: DeliveryPart) -> str | None:
    """What is wrong with the part after what has arrived before it; None for nothing."""
    num_here = len(proposal.draft_ids)
    if part.start != num_here:
        return f"part starts at {part.start}, expected {num_here}"
    if not part.draft_ids and part.num_draft_tokens:
        return "part has no ids"
    if num_here + len(part.draft_ids) > part.num_draft_tokens:
        return f"{num_here + len(part.draft_ids)} ids, more than the {part.num_draft_tokens} announced"
    if num_here:
        if part.committed_len != proposal.committed_len or part.num_draft_tokens > proposal.num_draft_tokens:
            return "parts of one proposal disagree"
        if (part.rows is None) != (not proposal.rows):
            return "some parts carry distributions, others do not"
        if bool(part.parents) != bool(proposal.parents):
            return "some parts are of a tree, others of a chain"
    return (
        None if proposal.expected is None else _mismatch(proposal.expected, part.committed_len, part.num_draft_tokens)
    )


def _mismatch(expected: tuple[int, int], committed_len: int, num_draft_tokens: int) -> str | None:
    """Why a proposal is not for the state that its verify asked about; None when it is."""
    if committed_len != expected[0]:
        return f"proposal continues length {committed_len}, verify is at {expected[0]}"
    if num_draft_tokens > expected[1]:
        return f"{num_draft_tokens} draft tokens, verify asked for {expected[1]}"
    return None
