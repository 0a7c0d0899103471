"""What a planner decides, round by round: each test makes the rounds."""

from __future__ import annotations

import itertools
import time

import pytest

from gateway.planning.draft_costs import MAX_PLANNED
from gateway.planning.planner import PLAIN_ROUNDS, TargetPlanner
from gateway.planning.slot_plan import PLAIN, SHORT_LEFT, DraftChoice, SlotPlan

STEPS = itertools.count(1)


class Driven:
    """One slot of a planner whose rounds the test makes."""

    def __init__(self, num_slots: int = 1, delay_s: float = 0.001) -> None:
        """delay_s: of a proposal, besides what it takes for each token."""
        self.now = 0.0
        self._delay_s = delay_s
        self.planner = TargetPlanner(clock=lambda: self.now)
        self.planner.num_slots = num_slots
        self.source = self.planner.source("draft-0", epoch=1)
        self.slot = SlotPlan(self.planner, self.source, "greedy")

    def round(self, num_accepted: int, num_behind: int = 2, num_left: float = 1000.0) -> DraftChoice:
        """A step takes 20 ms, and 1 ms for a token; a proposal 1 ms for a token besides its delay."""
        choice = self.slot.choose(64, num_behind, lambda: num_left)
        k = choice.num_draft_tokens
        step_s = 0.020 + 0.001 * k
        wait_s = self._delay_s + 0.001 * k if k else 0.0
        total_s = step_s + 0.001 + wait_s
        self.now += total_s
        is_new_step = self.planner.note_step(next(STEPS), self.planner.num_slots, self.planner.num_slots + k, 0, step_s)
        if k:
            self.slot.replied(wait_s, 0.001 * k, k, 2)
            self.slot.verified(k, min(k, num_accepted), wait_s, step_s, total_s, False, is_new_step)
        else:
            self.slot.plain(total_s, step_s, False, is_new_step)
        return choice


def test_a_restarted_target_is_learnt_anew_and_those_in_its_steps_stay_so() -> None:
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=3)
    assert driven.source.is_on and driven.planner.plain_s()
    driven.planner.restarted()
    assert driven.planner.num_slots == 1
    assert driven.planner.plain_s() == 0.0
    again = driven.planner.source("draft-0", epoch=1)
    assert again is not driven.source and not again.is_known
    driven.slot.leave()
    driven.source, driven.slot = again, SlotPlan(driven.planner, again, "greedy")
    counts = [driven.round(num_accepted=MAX_PLANNED).num_draft_tokens for _ in range(200)]
    assert counts[:PLAIN_ROUNDS] == [0] * PLAIN_ROUNDS and counts[-1] >= 12


def test_a_restarted_draft_is_learnt_anew() -> None:
    planner = TargetPlanner()
    first = planner.source("draft-0", epoch=1)
    assert planner.source("draft-0", epoch=1) is first
    second = planner.source("draft-0", epoch=2)
    assert second is not first and not second.is_known


def test_a_request_that_is_expected_to_be_short_starts_plain() -> None:
    """Its prompt would be fed to the draft for nothing."""
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=3)
    driven.slot.replied(0.5, 0.5, 3, 500)  # feeding takes 1 ms a token
    assert driven.round(3, num_behind=500, num_left=SHORT_LEFT - 1) == PLAIN
    assert driven.round(3, num_behind=500, num_left=20.0) == PLAIN, "20 tokens do not bring half a second back"
    assert driven.round(3, num_behind=500, num_left=1000.0).num_draft_tokens


def test_a_budget_that_is_spent_allows_no_trial() -> None:
    driven = Driven()
    driven.planner.spend(10.0)
    assert all(driven.round(num_accepted=MAX_PLANNED) == PLAIN for _ in range(500))


def test_a_machine_that_stood_still_for_a_round_does_not_end_learning() -> None:
    driven = Driven()
    while not driven.round(num_accepted=1).num_draft_tokens:
        pass
    driven.slot.verified(3, 1, 0.001, 0.020, 30.0, False, True)
    assert driven.planner.budget_s > 0.0
    driven.planner.spend(1000.0)
    chosen = []
    began_s = driven.now
    while driven.now - began_s < 120.0:
        chosen.append(driven.round(num_accepted=3).num_draft_tokens)
    assert chosen[-1] > 0


def test_nobody_but_one_slot_tries_a_draft_that_is_not_known() -> None:
    driven = Driven(num_slots=16)
    others = [SlotPlan(driven.planner, driven.source, "greedy") for _ in range(15)]
    for _ in range(PLAIN_ROUNDS):
        driven.round(0)
    chosen = [slot.choose(64, 2, lambda: 1000.0).num_draft_tokens for slot in [driven.slot, *others]]
    assert sum(k > 0 for k in chosen) == 1


def test_a_slot_that_leaves_leaves_nothing() -> None:
    driven = Driven()
    for _ in range(50):
        driven.round(num_accepted=2)
    driven.slot.leave()
    source = driven.source
    assert (source.num_slots, source.num_drafting, source.num_planned_tokens) == (0, 0, 0)
    assert source.sum_tokens == pytest.approx([0.0] * (MAX_PLANNED + 1))


def test_a_step_is_counted_once_however_late_its_verdicts_come() -> None:
    now = 1.0
    planner = TargetPlanner(clock=lambda: now)
    assert planner.note_step(1, 8, 8, 0, 0.030)
    for _ in range(7):
        now += 0.1
        assert not planner.note_step(1, 8, 8, 0, 0.030)
    assert planner.note_step(2, 8, 8, 0, 0.010)
    assert planner.steps.seconds(8, 8) == pytest.approx(0.020, abs=0.003)


def test_load_of_other_gateways_is_seen_in_the_batches() -> None:
    planner = TargetPlanner()
    planner.num_slots = 4
    for step in range(100):
        planner.note_step(next(STEPS), 16, 16, 0, 0.03 + 1e-5 * step)
    assert planner.load == pytest.approx(16, abs=0.5)
    for step in range(100):
        planner.note_step(next(STEPS), 4, 4, 0, 0.03 + 1e-5 * step)
    assert planner.load == pytest.approx(4, abs=0.5)


@pytest.mark.parametrize("num_slots", [1, 64])
def test_a_plain_round_costs_the_gateway_next_to_nothing(num_slots: int) -> None:
    """A generous limit: machines of tests are slow and busy. Measured 3 to 10 us."""
    driven = Driven(num_slots)
    for _ in range(100):
        driven.round(num_accepted=0)
    began_s = time.thread_time()
    for _ in range(1000):
        driven.round(num_accepted=0)
    assert (time.thread_time() - began_s) / 1000 < 200e-6


def test_a_trial_of_a_draft_that_is_too_slow_is_over_with_its_first_round_that_says_so() -> None:
    """What a trial costs, the one who tries waits for."""
    driven = Driven(delay_s=0.1)
    counts = [driven.round(num_accepted=0).num_draft_tokens for _ in range(20)]
    assert sum(k > 0 for k in counts) == 1
