"""How long a step is held back for slots that will be back at once."""

from __future__ import annotations

from target_service.returning import PATIENCE, Returning

SLOTS = [(1, 1), (1, 2), (2, 1)]
STEP_S = 0.1
LIMIT_S = PATIENCE * STEP_S


def a_round(returning: Returning, at: float, took_s: float) -> None:
    returning.answered(SLOTS, at, STEP_S)
    for key in SLOTS:
        returning.back(key, at + took_s)


def test_it_waits_until_all_are_back_and_no_longer_than_its_patience() -> None:
    returning = Returning()
    assert returning.wait_until(0.0) is None
    returning.answered(SLOTS, 10.0, STEP_S)
    assert returning.wait_until(10.0) == returning.wait_until(10.01) == 10.0 + LIMIT_S
    returning.back(SLOTS[0], 10.001)
    returning.back((9, 9), 10.001)  # was not asked for
    assert returning.wait_until(10.01) is not None
    assert returning.wait_until(10.0 + LIMIT_S) is None
    for key in SLOTS[1:]:
        returning.back(key, 10.002)
    assert returning.wait_until(10.003) is None


def test_slots_that_are_closed_are_not_waited_for() -> None:
    returning = Returning()
    returning.answered(SLOTS, 10.0, STEP_S)
    returning.owner_gone(1)
    assert returning.wait_until(10.0) is not None
    returning.gone((2, 1))
    assert returning.wait_until(10.0) is None


def test_a_gateway_too_far_away_is_not_waited_for_until_it_is_near_again() -> None:
    returning = Returning()
    for index in range(20):
        a_round(returning, float(index), 1.5 * LIMIT_S)
    returning.answered(SLOTS, 20.0, STEP_S)
    assert returning.wait_until(20.0) is None
    for index in range(20):
        a_round(returning, 30.0 + index, 0.1 * LIMIT_S)
    returning.answered(SLOTS, 50.0, STEP_S)
    assert returning.wait_until(50.0) is not None


def test_two_groups_that_take_turns_become_one_again() -> None:
    """Each comes back at once, and finds the other's step under way: that is no sign of a gateway far away."""
    returning = Returning()
    for index in range(20):
        a_round(returning, float(index), 1.5 * LIMIT_S)
    groups = [SLOTS[:1], SLOTS[1:]]
    for index in range(40):
        ended_s = 100.0 + STEP_S * index
        returning.answered(groups[index % 2], ended_s, STEP_S)
        for key in groups[(index + 1) % 2]:  # its verifies lay in the inbox
            returning.back(key, ended_s - STEP_S + 0.1 * LIMIT_S)
    assert returning.wait_until(ended_s) is not None


def test_a_step_that_fed_prompts_does_not_say_how_long_to_wait() -> None:
    returning = Returning()
    returning.answered(SLOTS, 10.0, STEP_S)
    returning.answered(SLOTS, 20.0, None)
    assert returning.wait_until(20.0) == 20.0 + LIMIT_S


def test_nobody_to_wait_for_teaches_nothing() -> None:
    returning = Returning()
    for index in range(20):
        a_round(returning, float(index), 3 * LIMIT_S)
    for index in range(50):
        returning.answered([], 100.0 + index, STEP_S)
    returning.answered(SLOTS, 200.0, STEP_S)
    assert returning.wait_until(200.0) is None
