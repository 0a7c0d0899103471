"""How loaded a worker is, by what this gateway has placed there and what the worker says now and then."""

from typing import Any

import pytest

from gateway.workers.member import Member
from gateway.workers.membership import MemberSpec
from outrider.v1 import common_pb2 as pb
from tests.unit.gateway.scripted_pool import link_of

NUM_SLOTS = 8


@pytest.fixture
def member() -> Member:
    made = Member(MemberSpec("draft", "draft", "draft", "draft"), link_of(None))
    says(made, 0)
    return made


def says(member: Member, num_slots_in_use: int) -> None:
    link: Any = member.link
    link.info = pb.WorkerInfo(num_slots=NUM_SLOTS, num_slots_in_use=num_slots_in_use)
    member.update_load(link.info)


def attach(member: Member, count: int) -> None:
    for _ in range(count):
        member.attach(object())


def test_a_slot_that_is_given_back_is_free_at_once(member: Member) -> None:
    """The worker said that all were in use, and says nothing new for a while: they were this gateway's."""
    assert member.load.num_choices == 0
    attach(member, NUM_SLOTS)
    says(member, NUM_SLOTS)
    assert member.load.is_full
    member.detach()
    assert (member.load.num_choices, member.load.is_full) == (NUM_SLOTS - 1, False)


def test_slots_that_it_counted_just_before_they_were_given_back_are_not_others(member: Member) -> None:
    attach(member, NUM_SLOTS)
    says(member, NUM_SLOTS)
    for _ in range(3):
        member.detach()
    says(member, NUM_SLOTS)
    assert member.load.num_choices == NUM_SLOTS - 3
    says(member, NUM_SLOTS)
    assert member.load.is_full, "by now it knows of them: the others are others'"


def test_slots_of_other_gateways_are_added_to_our_own(member: Member) -> None:
    attach(member, 1)
    says(member, 6)
    assert member.load.num_choices == 6
    attach(member, 2)
    assert (member.load.num_choices, member.load.is_full) == (8, True)
    says(member, 3)
    assert member.load.num_choices == 3


def test_a_refused_slot_makes_a_worker_full_until_its_next_report(member: Member) -> None:
    says(member, 2)
    attach(member, 1)
    assert not member.load.is_full
    member.note_exhausted()
    assert member.load.is_full
    says(member, 2)
    assert not member.load.is_full
