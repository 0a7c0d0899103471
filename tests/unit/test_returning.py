"""How long a step is held back for slots that will be back at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.engine.worker.jobs import SlotKey
from target_service.returning import DRAFT_PATIENCE, PATIENCE, Returning

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
