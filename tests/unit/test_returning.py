"""How long a step is held back for slots that will be back at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.engine.scheduler import SlotKey
from target_service.returning import DRAFT_PATIENCE, PATIENCE, STRAGGLER, Returning

SLOTS = [(1, 1), (1, 2), (2, 1)]
STEP_S = 0.1
LIMIT_S = PATIENCE * STEP_S
DRAFT_LIMIT_S = DRAFT_PATIENCE * STEP_S


class Held:
    """Slots of a target: `back` says when the next verify became ready. A step of all takes what one of half does."""

    def __init__(self, *, drafting: bool = False, joined_saves_s: float = STEP_S) -> None:
        self.drafting = drafting
        self.joined_saves_s = joined_saves_s
        self._ready: dict[SlotKey, float] = {}
        self.returning = Returning(self._ready.get)
        self.wait_until = self.returning.wait_until

    def answered(self, now: float, slots: Sequence[SlotKey] = SLOTS, step_s: float | None = STEP_S) -> None:
        for key in slots:
            self._ready.pop(key, None)
        plain, drafting = ([], slots) if self.drafting else (slots, [])
        self.returning.answered(plain, drafting, now, step_s, self.joined_saves_s)

    def back(self, key: SlotKey, ready_s: float) -> None:
        self._ready[key] = ready_s

    def rounds(self, at: float, took_s: float, count: int = 20) -> None:
        for index in range(count):
            self.answered(at + index)
            for key in SLOTS:
                self.back(key, at + index + took_s)
            self.wait_until(at + index + 0.5)


def test_it_waits_until_all_are_back_and_no_longer_than_its_patience() -> None:
    held = Held()
    assert held.wait_until(0.0) is None
    held.answered(10.0)
    assert held.wait_until(10.0) == held.wait_until(10.01) == 10.0 + LIMIT_S
    held.back(SLOTS[0], 10.001)
    held.back((9, 9), 10.001)  # was not asked for
    assert held.wait_until(10.01) is not None
    assert held.wait_until(10.0 + LIMIT_S) is None
    for key in SLOTS[1:]:
        held.back(key, 10.002)
    assert held.wait_until(10.003) is None


@pytest.mark.parametrize("drafting", [False, True])
def test_slots_that_are_closed_are_not_waited_for(drafting: bool) -> None:
    held = Held(drafting=drafting)
    held.answered(10.0)
    held.returning.owner_gone(1)
    assert held.wait_until(10.0) is not None
    held.returning.gone((2, 1))
    assert held.wait_until(10.0) is None


@pytest.mark.parametrize(("drafting", "limit_s"), [(False, LIMIT_S), (True, DRAFT_LIMIT_S)])
def test_who_is_too_far_away_is_not_waited_for_until_it_is_near_again(drafting: bool, limit_s: float) -> None:
    """A gateway, or a draft."""
    held = Held(drafting=drafting)
    held.rounds(0.0, 1.5 * limit_s)
    held.answered(20.0)
    assert held.wait_until(20.0) is None
    held.rounds(30.0, 0.1 * limit_s)
    held.answered(50.0)
    assert held.wait_until(50.0) is not None


def test_two_groups_that_take_turns_become_one_again() -> None:
    """Each comes back at once, and finds the other's step under way: that is no sign of a gateway far away."""
    held = Held()
    held.rounds(0.0, 1.5 * LIMIT_S)
    groups = [SLOTS[:1], SLOTS[1:]]
    for index in range(40):
        ended_s = 100.0 + STEP_S * index
        held.answered(ended_s, groups[index % 2])
        for key in groups[(index + 1) % 2]:  # its verifies lay in the inbox
            held.back(key, ended_s - STEP_S + 0.1 * LIMIT_S)
        until = held.wait_until(ended_s)
    assert until is not None


def test_a_step_that_fed_prompts_does_not_say_how_long_to_wait() -> None:
    held = Held()
    held.answered(10.0)
    held.answered(20.0, step_s=None)
    assert held.wait_until(20.0) == 20.0 + LIMIT_S


def test_nobody_to_wait_for_teaches_nothing() -> None:
    held = Held()
    held.rounds(0.0, 3 * LIMIT_S)
    for index in range(50):
        held.answered(100.0 + index, [])
    held.answered(200.0)
    assert held.wait_until(200.0) is None


def test_a_proposal_is_waited_for_as_long_as_a_second_step_would_take() -> None:
    held = Held(drafting=True)
    held.answered(10.0)
    assert held.wait_until(10.0) == 10.0 + DRAFT_LIMIT_S
    held = Held(drafting=True, joined_saves_s=0.02)
    held.answered(10.0)
    assert held.wait_until(10.0) == 10.0 + DRAFT_PATIENCE * 0.02


def test_nobody_drafts_while_the_target_waits_where_every_token_takes_its_time() -> None:
    held = Held(drafting=True, joined_saves_s=0.0)
    held.rounds(0.0, 0.001)
    held.answered(30.0)
    assert held.wait_until(30.0) is None


def test_a_straggler_is_waited_for_only_a_few_times_as_long_as_usual() -> None:
    held = Held(drafting=True)
    held.rounds(0.0, 0.005, count=60)
    held.answered(100.0)
    assert held.wait_until(100.0) == pytest.approx(100.0 + STRAGGLER * 0.005, rel=0.02)
    for key in SLOTS[1:]:
        held.back(key, 100.004)
    assert held.wait_until(100.01) == pytest.approx(100.0 + STRAGGLER * 0.005, rel=0.02)
    assert held.wait_until(100.02) is None


def test_a_slow_draft_does_not_keep_others_from_being_waited_for() -> None:
    """Each slot has what is usual for it."""
    held = Held(drafting=True)
    for index in range(30):
        held.answered(float(index))
        for key in SLOTS:
            held.back(key, index + (0.005 if key == SLOTS[0] else 0.3))
        held.wait_until(index + 0.5)
    held.answered(50.0, SLOTS[1:])
    assert held.wait_until(50.0) is None
    held.answered(60.0, SLOTS[:1])
    assert held.wait_until(60.0) is not None


def test_a_slot_counts_as_what_its_next_verify_is() -> None:
    """Not as what its last one was: who tries a slow draft keeps nobody, and who has left it comes at once."""
    slow = Held(drafting=True)
    slow.rounds(0.0, 0.3)
    slow.drafting = False
    slow.answered(50.0)
    assert slow.wait_until(50.001) is not None
    for key in SLOTS:
        slow.returning.arrived(key, with_drafts=True, due_s=60.0)
    assert slow.wait_until(50.001) is None
    quick = Held(drafting=True)
    quick.answered(50.0)
    for key in SLOTS:
        quick.returning.arrived(key, with_drafts=False, due_s=50.001)
        quick.back(key, 50.001)
    assert quick.wait_until(50.002) is None


def test_proposals_that_come_too_late_are_not_waited_for() -> None:
    held = Held(drafting=True)
    held.rounds(0.0, 0.005)
    for index in range(10):
        held.answered(100.0 + index)
        for key in SLOTS:
            held.returning.late(key)
    held.answered(120.0)
    assert held.wait_until(120.0) is None


def test_nobody_waits_longer_than_the_one_that_is_waited_for() -> None:
    """Its verify has a wait budget."""
    held = Held(drafting=True)
    held.answered(10.0, SLOTS[:1])
    held.returning.arrived(SLOTS[0], with_drafts=True, due_s=10.01)
    assert held.wait_until(10.002) == 10.01
    held.answered(20.0, SLOTS[:1])
    held.returning.arrived(SLOTS[0], with_drafts=True, due_s=20.002)  # its budget is 0
    assert held.wait_until(20.002) is None
