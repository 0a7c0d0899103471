"""How loaded a worker is, by what this gateway has placed there and what the worker says now and then."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.member import Member
from gateway.membership import MemberSpec
from outrider.v1 import common_pb2 as pb
from tests.unit.scripted_pool import link_of

NUM_SLOTS = 8


def told(num_slots_in_use: int) -> pb.WorkerInfo:
    return pb.WorkerInfo(num_slots=NUM_SLOTS, num_slots_in_use=num_slots_in_use)


@pytest.fixture
def link() -> Any:
    return link_of(None, told(0))


@pytest.fixture
def member(link: Any) -> Member:
    return Member(MemberSpec("draft", "draft", "draft", "draft"), link)


def attach(member: Member, count: int) -> None:
    for _ in range(count):
        member.attach()


def test_a_slot_that_is_given_back_is_free_at_once(member: Member, link: Any) -> None:
    """The worker said that all were in use, and says nothing new for a while: they were this gateway's."""
    assert member.load.num_requests == 0
    attach(member, NUM_SLOTS)
    link.info = told(NUM_SLOTS)
    assert member.load.full
    member.detach()
    assert (member.load.num_requests, member.load.full) == (NUM_SLOTS - 1, False)


def test_slots_that_ended_before_the_worker_is_read_are_not_others(member: Member, link: Any) -> None:
    attach(member, NUM_SLOTS)
    link.info = told(NUM_SLOTS)
    for _ in range(3):
        member.detach()
    assert member.load.num_requests == NUM_SLOTS - 3


def test_slots_of_others_count_beside_those_that_come(member: Member, link: Any) -> None:
    attach(member, 1)
    link.info = told(6)
    assert member.load.num_requests == 6
    attach(member, 2)
    assert (member.load.num_requests, member.load.full) == (8, True)
    link.info = told(3)
    assert member.load.num_requests == 3


def test_a_slot_that_is_refused_makes_it_full_until_it_says_how_it_is(member: Member, link: Any) -> None:
    link.info = told(2)
    attach(member, 1)
    assert not member.load.full
    member.told_exhausted()
    assert member.load.full
    link.info = told(2)
    assert not member.load.full
