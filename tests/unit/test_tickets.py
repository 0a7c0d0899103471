"""Proposals on their way to a verify: order, agreement, bounds, and that nothing is held or miscounted afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.wire.transport.codec import DenseRows
from target_service.tickets import Arrival, DeliveryPart, TicketTable

TTL_S = 10.0


def part(ticket: int = 1, start: int = 0, ids: tuple[int, ...] = (5,), of: int = 3, **other: object) -> DeliveryPart:
    made = DeliveryPart(
        ticket, committed_len=9, start=start, draft_ids=ids, num_draft_tokens=of, rows=None, num_bytes=10
    )
    return replace(made, **other)


class Table:
    """A TicketTable that counts what it drops."""

    def __init__(self, max_tickets: int = 4, max_bytes: int = 100) -> None:
        self.drops: Counter[str] = Counter()
        self.table = TicketTable(max_tickets, max_bytes, TTL_S, self._count)

    def _count(self, why: str, num_tokens: int) -> None:
        self.drops[why] += num_tokens

    def deliver(self, *parts: DeliveryPart, now: float = 0.0) -> list[Arrival]:
        return [self.table.deliver(p, now) for p in parts]


@pytest.fixture
def held() -> Table:
    return Table()


WHOLE = (part(start=0, ids=(5,)), part(start=1, ids=(6, 7)))


def test_parts_make_a_proposal(held: Table) -> None:
    assert held.deliver(*WHOLE) == [Arrival.TAKEN, Arrival.COMPLETE]
    proposal = held.table.expect(1, 9, 3, now=1.0)
    assert proposal.complete and proposal.draft_ids == [5, 6, 7] and proposal.refused is None
    assert len(held.table) == 1
    held.table.finish(1)
    assert len(held.table) == 0 and not held.drops


def test_the_verify_may_come_first_or_in_between(held: Table) -> None:
    proposal = held.table.expect(1, 9, 5, now=0.0)
    assert not proposal.complete and not proposal.gone
    held.deliver(*WHOLE)
    assert proposal.complete
    held.deliver(part(ticket=2))
    between = held.table.expect(2, 9, 3, now=0.0)
    held.deliver(part(ticket=2, start=1, ids=(6, 7)))
    assert between.draft_ids == [5, 6, 7] and between.complete


@pytest.mark.parametrize(
    "second, reason",
    [
        (part(start=0), "starts at 0, expected 1"),
        (part(start=2), "starts at 2, expected 1"),
        (part(start=1, ids=()), "no ids"),
        (part(start=1, ids=(6, 7, 8)), "4 ids, more than the 3"),
        (part(start=1, of=4), "disagree"),
        (part(start=1, committed_len=10), "disagree"),
        (part(start=1, rows=DenseRows(1, b"")), "some parts carry"),
    ],
)
@pytest.mark.parametrize("expected", [False, True])
def test_a_part_that_does_not_fit_refuses_all(held: Table, second: DeliveryPart, reason: str, expected: bool) -> None:
    if expected:
        held.table.expect(1, 9, 5, now=0.0)
    assert held.deliver(part(), second, part(start=1, ids=(6, 7))) == [
        Arrival.TAKEN,
        Arrival.REFUSED,
        Arrival.REFUSED,
    ]
    proposal = held.table.expect(1, 9, 5, now=0.0)
    assert proposal.refused is not None and reason in proposal.refused
    assert not proposal.complete and proposal.draft_ids == []
    assert held.drops["refused"] == 1 + len(second.draft_ids) + 2


@pytest.mark.parametrize(
    "expected, reason",
    [
        ((8, 3), "continues length 9, verify is at 8"),
        ((10, 3), "continues length 9, verify is at 10"),
        ((9, 2), "3 draft tokens, verify asked for 2"),
    ],
)
@pytest.mark.parametrize("verify_first", [False, True])
def test_a_proposal_for_another_state_is_refused(
    held: Table, expected: tuple[int, int], reason: str, verify_first: bool
) -> None:
    if verify_first:
        proposal = held.table.expect(1, *expected, now=0.0)
        assert held.deliver(*WHOLE) == [Arrival.REFUSED, Arrival.REFUSED]
    else:
        held.deliver(*WHOLE)
        proposal = held.table.expect(1, *expected, now=0.0)
    assert proposal.refused is not None and reason in proposal.refused
    assert held.drops["refused"] == 3


def test_after_completion_nothing_changes_it(held: Table) -> None:
    """The engine reads it without a lock."""
    held.deliver(*WHOLE)
    proposal = held.table.expect(1, 9, 3, now=0.0)
    rows, ids = list(proposal.rows), list(proposal.draft_ids)
    assert held.deliver(part(), part(start=3)) == [Arrival.REFUSED] * 2
    held.table.refuse(1, "stale epoch", 2, now=0.0)
    assert proposal.refused is None and proposal.complete
    assert (proposal.rows, proposal.draft_ids) == (rows, ids)
    assert held.drops["refused"] == 4


def test_a_verify_for_a_finished_ticket_knows_that_nothing_will_come(held: Table) -> None:
    held.table.finish(1)
    assert held.table.expect(1, 9, 3, now=0.0).gone
    assert held.deliver(part()) == [Arrival.LATE]


def test_what_a_verify_awaits_never_gives_way(held: Table) -> None:
    waiting = [held.table.expect(t, 9, 3, now=0.0) for t in range(4)]
    assert held.deliver(part(ticket=9)) == [Arrival.OVERFLOW]
    assert held.table.expect(9, 9, 3, now=0.0).gone, "its verify need not wait"
    for proposal in waiting:
        held.deliver(*(replace(p, ticket=proposal.ticket) for p in WHOLE))
        assert proposal.complete


def test_bound_of_bytes(held: Table) -> None:
    assert held.deliver(part(num_bytes=90), part(ticket=2, num_bytes=11)) == [Arrival.TAKEN] * 2
    assert held.drops == {"overflow": 1} and held.table.expect(1, 9, 3, now=0.0).gone
    assert held.deliver(part(ticket=3, num_bytes=101)) == [Arrival.OVERFLOW], "it alone is too much"
    assert held.deliver(part(ticket=4, num_bytes=100)) == [Arrival.TAKEN], "what was refused holds no bytes"
    assert held.deliver(part(ticket=4, start=1, num_bytes=1)) == [Arrival.OVERFLOW]
    assert held.deliver(part(ticket=5, num_bytes=100)) == [Arrival.TAKEN]


def test_proposals_that_nobody_asked_for_take_no_room_from_the_others(held: Table) -> None:
    """A draft that fills table and memory with tickets of its own."""
    waiting = held.table.expect(1, 9, 3, now=0.0)
    for ticket in range(1000, 1100):
        held.deliver(part(ticket=ticket, num_bytes=40))
    assert held.deliver(part(num_bytes=50), part(start=1, ids=(6, 7), num_bytes=50)) == [
        Arrival.TAKEN,
        Arrival.COMPLETE,
    ]
    assert waiting.complete and waiting.draft_ids == [5, 6, 7]
    early = (part(ticket=2, num_bytes=1), part(ticket=2, start=1, ids=(6, 7), num_bytes=1))
    held.table.finish(1)
    held.deliver(part(ticket=2000, num_bytes=99))
    assert held.deliver(*early) == [Arrival.TAKEN, Arrival.COMPLETE]
    assert held.table.expect(2, 9, 3, now=0.0).complete


def test_time_to_live(held: Table) -> None:
    held.deliver(part(), now=0.0)
    held.deliver(part(ticket=2), now=4.0)
    held.deliver(part(ticket=3), now=5.0)
    held.table.expect(2, 9, 3, now=5.0)
    assert held.table.next_expiry() == TTL_S
    held.table.expire(9.9)
    assert len(held.table) == 3
    held.table.expire(10.0)
    assert held.table.next_expiry() == 15.0
    held.table.expire(100.0)
    assert len(held.table) == 1, "a verify waits for this one: its budget decides"
    assert held.table.next_expiry() is None
    assert held.drops == {"expired": 2}
    assert held.deliver(part(start=1), now=100.0) == [Arrival.LATE]


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: the bounds hold and every token is verified, dropped or still held."""

    tickets = st.integers(0, 6)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = Table(max_tickets=3, max_bytes=60)
        self.delivered = self.verified = 0
        self.waiting: dict[int, object] = {}

    @rule(
        ticket=tickets, start=st.integers(0, 3), size=st.integers(0, 3), of=st.integers(1, 4), length=st.integers(9, 10)
    )
    def deliver(self, ticket: int, start: int, size: int, of: int, length: int) -> None:
        self.delivered += size
        self.held.deliver(part(ticket, start, (5,) * size, of, committed_len=length, num_bytes=7), now=self.now)

    @rule(ticket=tickets, size=st.integers(0, 3))
    def broken(self, ticket: int, size: int) -> None:
        self.delivered += size
        self.held.table.refuse(ticket, "broken", size, self.now)

    @rule(ticket=tickets, k=st.integers(1, 4))
    def expect(self, ticket: int, k: int) -> None:
        if ticket not in self.waiting:
            self.waiting[ticket] = self.held.table.expect(ticket, 9, k, self.now)

    @rule(ticket=tickets)
    def finish(self, ticket: int) -> None:
        proposal = self.waiting.pop(ticket, None)
        if proposal is None:
            return
        if proposal.complete and proposal.refused is None:
            assert proposal.committed_len == 9
            assert len(proposal.draft_ids) == proposal.num_draft_tokens <= proposal.expected[1]
            self.verified += len(proposal.draft_ids)
            self.held.table.finish(ticket)
        else:
            self.held.table.finish(ticket, "late")

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.held.table.expire(self.now)

    @invariant()
    def bounded_and_counted(self) -> None:
        proposals = list(self.held.table._open.values())
        assert sum(p.expected is None for p in proposals) <= 3
        assert sum(p.num_bytes for p in proposals) == self.held.table._num_bytes <= 60
        still = sum(len(p.draft_ids) for p in proposals)
        assert self.delivered == self.verified + sum(self.held.drops.values()) + still

    def teardown(self) -> None:
        for ticket in list(self.waiting):
            self.finish(ticket)
        self.held.table.expire(self.now + TTL_S)
        assert len(self.held.table) == 0 and self.held.table._num_bytes == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
