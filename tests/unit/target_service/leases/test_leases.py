"""All leases of a target: who has one, where it ends, and what becomes of deliveries."""

from typing import Any

import pytest

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.worker.jobs import JobError, JobFault, OpenJob
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.lease import Lease
from target_service.leases.lease_jobs import ExtendJob, VerifyJob
from target_service.leases.leases import Leases
from tests.unit.outrider.engine.worker.opened import PROMPT, make_table

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
MAX_BYTES = 1000
KEY = (1, 1)


class Table:
    """Leases of slot 1, and what its gateway is answered."""

    def __init__(self) -> None:
        self.answers = list[Any]()
        self.metrics = WorkerMetrics("target")
        self.leases = Leases(MAX_BYTES, self.metrics, lambda send: send())
        self.slot: Slot = make_table().open(*KEY, PROMPT, len(PROMPT), PARAMS)
        self.leases.opened(self.job())

    def job(self) -> OpenJob:
        speculation = Speculation(max_draft_tokens=8)
        return OpenJob(*KEY, tuple(PROMPT), 4, PARAMS, print, speculation=speculation, drafter=Drafter.NGRAM)

    def begin(self, *tickets: int, lease_end_len: int = 8) -> Lease:
        named = [(ticket, True) for ticket in tickets]
        return self.leases.begin(VerifyJob(*KEY, 4, (), named, lease_end_len, 1.0, self.answers.append), self.slot)

    def count(self, fate: str) -> float:
        """Return the number of delivered draft tokens of which this became."""
        return self.metrics.registry.get_sample_value("spec_parked_tokens_total", {"fate": fate}) or 0.0


def delivery(ticket: int, *ids: int, num_bytes: int = 100) -> Delivery:
    nums = range(len(ids))
    kinds = [NodeKind.DETERMINISTIC] * len(ids)
    parents = [index - 1 if index else ROOT for index in nums]
    return Delivery(ticket, len(PROMPT), ids, parents, [0] * len(ids), kinds, None, num_bytes=num_bytes)


def test_a_lease_is_found_by_its_slot_and_by_each_of_its_tickets_until_it_ends() -> None:
    table = Table()
    leases = table.leases
    lease = table.begin(11, 12)
    assert (leases.get(KEY), leases.lease_of_ticket(11), leases.lease_of_ticket(12)) == (lease, lease, lease)
    assert (len(leases), leases.running(), list(lease.own_drafters)) == (1, [lease], [Drafter.NGRAM])
    leases.opened(table.job())
    assert table.answers == [JobError(JobFault.CANCELLED, "verify cancelled: the slot was opened again")]
    assert (leases.get(KEY), leases.lease_of_ticket(11), len(leases)) == (None, None, 0)
    leases.end(KEY, "again")
    assert len(table.answers) == 1, "a slot without a lease has nobody to answer"
    table.begin(13)
    leases.end(KEY, "out of memory", JobFault.EXHAUSTED)
    assert table.answers[1:] == [JobError(JobFault.EXHAUSTED, "out of memory")]
    assert leases.slots_of(1) == [KEY] and leases.slots_of(2) == []
    leases.closed(KEY)
    assert leases.slots_of(1) == []


@pytest.mark.parametrize(("ticket", "lease_end_len", "expected"), [(11, 9, 9), (11, 8, 8), (11, 7, 8), (12, 9, 8)])
def test_a_lease_is_only_ever_extended_and_by_its_first_ticket(ticket: int, lease_end_len: int, expected: int) -> None:
    table = Table()
    lease = table.begin(11, 12)
    table.leases.extend(ExtendJob(*KEY, ticket, lease_end_len), now=5.0)
    assert (lease.job.lease_end_len, lease.ready_s) == (expected, 1.0), "it runs: nothing begins anew"


def test_a_lease_that_had_ended_is_ready_from_when_it_was_extended() -> None:
    table = Table()
    lease = table.begin(11, lease_end_len=4)
    assert table.leases.running() == []
    table.leases.extend(ExtendJob(*KEY, 11, 6), now=5.0)
    assert (table.leases.running(), lease.ready_s) == ([lease], 5.0)


def test_the_queue_takes_one_delivery_of_any_size_and_else_only_what_fits() -> None:
    table = Table()
    assert table.leases.hand_in(delivery(11, 1, num_bytes=5 * MAX_BYTES))
    assert not table.leases.hand_in(delivery(11, 1, num_bytes=1))
    table.leases.insert_deliveries()
    assert table.leases.hand_in(delivery(11, 1, num_bytes=600))
    assert table.leases.hand_in(delivery(11, 1, num_bytes=400))
    assert not table.leases.hand_in(delivery(11, 1, num_bytes=1))


def test_during_a_step_a_delivery_waits_for_its_lease_and_else_it_has_expired() -> None:
    table = Table()
    table.leases.hand_in(delivery(11, 7, 8))
    table.leases.insert_deliveries(in_step=True)
    lease = table.begin(11)
    table.leases.insert_deliveries()
    assert lease.first.buffer.tree.ids == [7, 8]
    table.leases.hand_in(delivery(99, 7, 8))
    table.leases.insert_deliveries()
    assert table.count("expired") == 2


def test_a_delivery_that_broke_a_rule_is_its_drafts_alone() -> None:
    table = Table()
    lease = table.begin(11, 12)
    table.leases.refuse(12, "an id is 99")
    table.leases.refuse(99, "no such lease")
    assert [(draft.is_refused, draft.is_active) for draft in lease.drafts] == [(False, True), (True, False)]
