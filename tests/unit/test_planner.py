"""What a planner decides, round by round: each test makes the rounds."""

from __future__ import annotations

import time

import pytest

from gateway.acceptance_curve import MAX_PLANNED
from gateway.draft_costs import FIRST_PAUSE_S, Level
from gateway.planner import FIRST_TOKENS, PLAIN_ROUNDS, PLAN_DECISIONS, TargetPlanner
from gateway.slot_plan import PLAIN, REST_ROUNDS, SHORT_LEFT, Choice, SlotPlan


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

    def round(self, num_accepted: int, num_behind: int = 2, num_left: float = 1000.0) -> Choice:
        """A step takes 20 ms, and 1 ms for a token; a proposal 1 ms for a token besides its delay."""
        choice = self.slot.choose(64, num_behind, lambda: num_left)
        k = choice.num_draft_tokens
        step_s = 0.020 + 0.001 * k
        wait_s = self._delay_s + 0.001 * k if k else 0.0
        total_s = step_s + 0.001 + wait_s
        self.now += total_s
        is_new_step = self.planner.note_step(self.planner.num_slots, self.planner.num_slots + k, 0, step_s)
        if k:
            self.slot.replied(wait_s, 0.001 * k, k, 2)
            self.slot.verified(k, min(k, num_accepted), wait_s, step_s, total_s, False, is_new_step)
        else:
            self.slot.plain(total_s, step_s, False, is_new_step)
        return choice


def test_a_text_that_was_hard_for_a_while_is_drafted_for_again() -> None:
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=4)
    other = SlotPlan(driven.planner, driven.source, "greedy")
    for _ in range(40):
        other.verified(4, 0, 0.0, 0.02, 0.03, True, False)
    poor = other.expected_tokens(4)
    for _ in range(100):
        driven.round(num_accepted=4)
    for _ in range(200):
        other.plain(0.02, 0.02, True, False)
    assert poor < 2.5 < driven.slot.expected_tokens(4) - 1.0 < other.expected_tokens(4)


def test_no_slot_drafts_more_than_is_known() -> None:
    """What so many proposals at once take the draft, here."""
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=MAX_PLANNED)
    planner, source = driven.planner, driven.source
    slots = [driven.slot, *(SlotPlan(planner, source, "greedy") for _ in range(15))]
    planner.num_slots = 16
    planner.note_step(16, 200, 0, 0.050)
    for step in range(PLAIN_ROUNDS):
        planner.note_step(16, 16, 0, 0.030 + 1e-6 * step)
    for _ in range(4):
        driven.now += 0.1
        chosen = [slot.choose(64, 2, lambda: 1000.0).num_draft_tokens for slot in slots]
    assert planner.plan(source).most == FIRST_TOKENS == max(chosen)


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


def test_plain_rounds_come_first_then_a_trial_then_what_pays() -> None:
    driven = Driven()
    counts = [driven.round(num_accepted=MAX_PLANNED).num_draft_tokens for _ in range(200)]
    assert counts[:PLAIN_ROUNDS] == [0] * PLAIN_ROUNDS
    assert 0 < counts[PLAIN_ROUNDS] <= 4
    assert counts[-1] >= 12
    assert Driven().round(num_accepted=0) == PLAIN


def test_a_request_that_is_expected_to_be_short_starts_plain() -> None:
    """Its prompt would be fed to the draft for nothing."""
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=3)
    driven.slot.replied(0.5, 0.5, 3, 500)  # feeding takes 1 ms a token
    assert driven.round(3, num_behind=500, num_left=SHORT_LEFT - 1) == PLAIN
    assert driven.round(3, num_behind=500, num_left=20.0) == PLAIN, "20 tokens do not bring half a second back"
    assert driven.round(3, num_behind=500, num_left=1000.0).num_draft_tokens


def test_a_short_request_is_plain_however_short_its_prompt_until_it_turns_out_longer() -> None:
    driven = Driven()
    for _ in range(50):
        driven.round(num_accepted=3)
    driven.slot.leave()
    slot = SlotPlan(driven.planner, driven.source, "greedy")
    assert slot.choose(64, 2, lambda: SHORT_LEFT - 1, is_first=True) == PLAIN
    assert slot.choose(64, 3, lambda: SHORT_LEFT - 1) == PLAIN
    assert slot.choose(64, 4, lambda: SHORT_LEFT).num_draft_tokens
    slot.verified(3, 3, 0.003, 0.023, 0.027, False, True)
    assert slot.choose(64, 4, lambda: SHORT_LEFT - 1).num_draft_tokens, "it is at the draft: its end costs nothing more"
    slot.leave()


def test_drafts_of_the_target_itself_are_for_short_requests_too() -> None:
    driven = Driven()
    driven.source.own = True
    for _ in range(50):
        driven.round(num_accepted=3)
    slot = SlotPlan(driven.planner, driven.source, "greedy")
    assert slot.choose(64, 0, lambda: SHORT_LEFT - 1, is_first=True).num_draft_tokens


def test_a_proposal_that_first_catches_up_is_not_waited_for_longer_than_it_is_worth() -> None:
    driven = Driven()
    for _ in range(100):
        driven.round(num_accepted=3)
    assert 0.0 < driven.round(3).wait_s < 0.2
    driven.slot.replied(0.5, 0.5, 3, 500)
    assert driven.round(3, num_behind=500).wait_s == 0.0


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


def test_drafts_that_failed_at_a_load_stay_off_there_though_they_are_on_at_another() -> None:
    driven = Driven(num_slots=1)
    for _ in range(40):
        driven.round(num_accepted=3)
    assert driven.source.is_on
    driven.source.level(1).pause.from_s = driven.now + 60.0
    num_drafted = sum(driven.round(num_accepted=3).num_draft_tokens > 0 for _ in range(200))
    assert num_drafted <= PLAN_DECISIONS and not driven.source.is_on
    assert driven.source.level(1).trials.is_new, "one slot that tries would find that drafts are paused"


def test_nobody_tries_where_drafts_could_not_begin_whatever_came_of_it() -> None:
    """One trial after the other would spend all that there is for learning."""
    driven = Driven()
    for _ in range(40):
        driven.round(num_accepted=3)
    planner, source = driven.planner, driven.source
    source.is_on = False
    source.level(1).pause.failed(driven.now - FIRST_PAUSE_S)
    planner.budget_s = -0.2
    assert not planner.may_try(source)
    planner.budget_s = 0.05
    assert planner.may_try(source)


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


def test_a_slot_is_one_of_its_source_once_it_is_one_of_the_load() -> None:
    """Drafts would be planned for all that begin, at the load of the first of them."""
    driven = Driven()
    for _ in range(50):
        driven.round(num_accepted=3)
    assert driven.source.is_on
    beginning = [SlotPlan(driven.planner, driven.source, "greedy") for _ in range(8)]
    chosen = [slot.choose(64, 2, lambda: 1000.0, is_first=True).num_draft_tokens for slot in beginning]
    assert driven.source.num_slots == 1
    assert sum(k > 0 for k in chosen) == 1, "one that begins is drafted for, many are another load"
    for num_joined, slot in enumerate(beginning, start=2):
        driven.planner.num_slots += 1
        slot.choose(64, 2, lambda: 1000.0)
        assert driven.source.num_slots == num_joined == driven.planner.load
    for slot in beginning:
        slot.leave()
    assert (driven.source.num_slots, driven.source.num_first) == (1, 0)


def test_answers_whose_first_verdicts_come_together_are_one_load_from_the_first() -> None:
    planner = TargetPlanner(clock=lambda: 1.0)
    planner.num_slots = 1
    planner.note_step(8, 8, 0, 0.030)
    assert planner.load == 8


def test_drafts_do_not_begin_while_slots_are_joining_unless_they_still_pay_half_a_round_later() -> None:
    driven = Driven()
    for _ in range(50):
        driven.round(num_accepted=3)
    source = driven.source
    source.is_on = False
    source.joined_s = driven.now
    driven.planner.num_slots = 2  # a plan for another load
    assert driven.planner.plan(source).num_draft_tokens == 0
    driven.now += 0.6 * driven.planner.plain_s()
    source.joined_s = driven.now
    driven.planner.num_slots = 3
    assert driven.planner.plan(source).num_draft_tokens > 0, "slots join all the time where there are many"


def test_a_slot_rests_after_it_was_found_that_drafts_do_not_pay_until_something_changes() -> None:
    driven = Driven()
    while driven.round(num_accepted=0).num_draft_tokens or not driven.slot.rests:
        pass
    assert not driven.source.is_on
    driven.planner.num_slots = 2
    assert not driven.slot.rests
    driven.planner.num_slots = 1
    assert driven.slot.rests
    driven.source.is_on = True
    assert not driven.slot.rests
    driven.source.is_on = False
    driven.now += 1.1 * REST_ROUNDS * driven.planner.plain_s()
    assert not driven.slot.rests


def test_a_load_at_which_nothing_is_lost_has_not_failed() -> None:
    level = Level()
    for _ in range(8000):
        level.came(1, 1 / 1.001, num_slots=32)
    assert not level.has_failed(32, now=100.0) and level.is_proven
    for _ in range(8000):
        level.came(1, 1 / 0.97, num_slots=32)
    assert level.has_failed(32, now=100.0) and not level.is_proven


@pytest.mark.parametrize(("won", "is_proven"), [(0.97, False), (1.0, True)])
def test_a_load_is_proven_by_tokens_won_not_by_none_lost(won: float, is_proven: bool) -> None:
    level = Level()
    level.pause.failed(0.0)
    for _ in range(40):
        level.came(1, 1 / won, num_slots=1)
    level.pause.from_s = 0.0
    assert not level.has_failed(1, now=100.0)
    assert (level.is_proven, level.pause.is_new) == (is_proven, is_proven)


def test_drafts_of_the_target_itself_are_not_waited_for() -> None:
    driven = Driven()
    driven.source.own = True
    for _ in range(100):
        last = driven.round(num_accepted=3)
    assert last.num_draft_tokens and last.wait_s == 0.0


def test_a_step_is_counted_once_whatever_number_of_verdicts_comes_of_it() -> None:
    planner = TargetPlanner()
    for _ in range(8):
        planner.note_step(8, 8, 0, 0.030)
    planner.note_step(8, 8, 0, 0.010)
    assert planner.steps.seconds(8, 8) == pytest.approx(0.020, abs=0.003)


def test_load_of_other_gateways_is_seen_in_the_batches() -> None:
    planner = TargetPlanner()
    planner.num_slots = 4
    for step in range(100):
        planner.note_step(16, 16, 0, 0.03 + 1e-5 * step)
    assert planner.load == pytest.approx(16, abs=0.5)
    for step in range(100):
        planner.note_step(4, 4, 0, 0.03 + 1e-5 * step)
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


def test_a_trial_that_ends_with_its_answer_says_nothing_of_drafts() -> None:
    driven = Driven()
    for _ in range(PLAIN_ROUNDS + 2):
        driven.round(num_accepted=3)
    assert not driven.source.is_known
    driven.slot.leave()
    driven.slot = SlotPlan(driven.planner, driven.source, "greedy")
    assert driven.round(num_accepted=3).num_draft_tokens > 0, "the next answer tries"


def test_what_failed_at_a_load_is_not_tried_at_once_again_there_nor_at_a_larger_one() -> None:
    source = TargetPlanner().source("draft-0", epoch=1)
    source.tried(4, now=10.0, pays=False)
    for load, may_be in ((1, True), (2, True), (4, False), (7, False), (64, False)):
        assert source.may_be_tried(load, now=11.0) is may_be
    assert source.may_be_tried(64, now=10.0 + FIRST_PAUSE_S)
    source.tried(1, now=12.0, pays=True)
    assert source.may_be_tried(64, now=12.0)
