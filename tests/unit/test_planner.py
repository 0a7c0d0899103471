"""K that adapts, in a simulated system: never slower than plain decoding, near the best fixed K where drafts pay."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from gateway.acceptance_curve import MAX_PLANNED
from gateway.draft_costs import FIRST_PAUSE_S, Level
from gateway.planner import FIRST_TOKENS, PLAIN_ROUNDS, PLAN_DECISIONS, TargetPlanner
from gateway.slot_plan import PLAIN, REST_ROUNDS, SHORT_LEFT, TRIAL_ROUNDS, Choice, SlotPlan
from gateway.step_model import FORGET_S
from tests.unit.planned_system import Pair, System


def cpu_step_s(num_slots: int, num_tokens: int) -> float:
    """Weights are read up to some seven tokens; more are computed."""
    return max(0.020 + 0.0008 * num_tokens, 0.004 + 0.0034 * num_tokens)


def gpu_step_s(num_slots: int, num_tokens: int) -> float:
    return 0.012 + 0.00002 * num_tokens + 0.0001 * max(0, num_tokens - 256)


def pair(step_s: object, acceptance: float, delay_s: float = 0.0, noise: float = 0.03) -> Pair:
    return Pair(
        step_s,  # type: ignore[arg-type]
        lambda num_proposals: 0.0012 + 0.00015 * num_proposals,
        lambda position: acceptance,
        delay_s,
        noise,
    )


DRAFTS = {"good": (0.8, 0.0), "fair": (0.55, 0.0), "poor": (0.002, 0.0), "slow": (0.55, 0.05)}
TARGETS = {"cpu": cpu_step_s, "gpu": gpu_step_s}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    ("target", "num_slots"), [*(("cpu", num_slots) for num_slots in (1, 2, 4, 8, 16, 64)), ("gpu", 1), ("gpu", 16)]
)
def test_never_slower_than_plain_and_near_the_best_fixed_k(target: str, num_slots: int, draft: str) -> None:
    true = pair(TARGETS[target], *DRAFTS[draft])
    seconds = 8.0 if num_slots <= 4 else 3.0 if target == "cpu" else 2.0
    counts = (0, 2, 4, 6) if num_slots <= 4 else (0, 3)
    fixed = {k: System(true, num_slots, k, seed=1).run(seconds) for k in counts}
    planned = System(true, num_slots, None, seed=1)
    planned.run(seconds)  # it learns
    rate = planned.run(seconds)
    assert rate >= 0.96 * fixed[0], fixed
    assert rate >= (0.92 if num_slots == 1 else 0.8) * max(fixed.values()), fixed


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("target", "num_slots", "acceptance"), [("gpu", 16, 0.55), ("gpu", 8, 0.55), ("cpu", 4, 0.8)])
def test_drafts_that_pay_stay_on(target: str, num_slots: int, acceptance: float, seed: int) -> None:
    true = pair(TARGETS[target], acceptance)
    best = max(System(true, num_slots, k, seed=1).run(3.0) for k in (1, 2))
    planned = System(true, num_slots, None, seed=seed)
    planned.run(3.0)
    num_chosen = len(planned.chosen)
    assert planned.run(6.0) >= 0.85 * best
    chosen = planned.chosen[num_chosen:]
    assert sum(k > 0 for k in chosen) > 0.6 * len(chosen)


@pytest.mark.parametrize("draft", ["poor", "slow"])
def test_learning_costs_at_most_a_percent_of_the_time_and_ever_less(draft: str) -> None:
    true = pair(cpu_step_s, *DRAFTS[draft], noise=0.0)
    plain = System(true, 1, 0).run(60.0)
    planned = System(true, 1, None)
    planned.run(60.0)
    early = len(planned.chosen), sum(k > 0 for k in planned.chosen)
    assert planned.run(240.0) >= 0.99 * plain
    late = len(planned.chosen) - early[0], sum(k > 0 for k in planned.chosen) - early[1]
    assert 0 < early[1] < 0.05 * early[0]
    assert late[1] / late[0] < early[1] / early[0]


def test_drafts_resume_at_once_when_the_load_falls() -> None:
    system = System(pair(cpu_step_s, *DRAFTS["good"]), 32, None)
    system.run(20.0)
    before = len(system.chosen)
    system.run(5.0)
    assert sum(k > 0 for k in system.chosen[before:]) < 0.02 * (len(system.chosen) - before)
    system.set_slots(1)
    system.run(0.5)
    before = len(system.chosen)
    system.run(1.0)
    chosen = system.chosen[before:]
    assert sum(k > 0 for k in chosen) > 0.8 * len(chosen)


def test_and_stop_when_it_rises() -> None:
    system = System(pair(cpu_step_s, *DRAFTS["fair"]), 1, None)
    system.run(5.0)
    assert sum(k > 0 for k in system.chosen[-20:]) > 15
    system.set_slots(32)
    system.run(5.0)
    before = len(system.chosen)
    system.run(3.0)
    assert sum(k > 0 for k in system.chosen[before:]) < 0.02 * (len(system.chosen) - before)


def test_a_draft_that_becomes_poor_is_left_and_one_that_becomes_good_is_found() -> None:
    true = pair(gpu_step_s, *DRAFTS["good"])
    system = System(true, 1, None)
    system.run(5.0)
    system.pair = replace(true, acceptance=lambda position: 0.0)
    system.run(3.0)
    assert sum(k > 0 for k in system.chosen[-100:]) <= TRIAL_ROUNDS
    system.pair = true
    system.run(60.0)
    assert sum(k > 0 for k in system.chosen[-50:]) > 40


def test_a_while_in_which_large_steps_were_slow_is_forgotten() -> None:
    """Another process was on the cores; when it is gone, nobody takes such steps to find out."""

    def disturbed_s(num_slots: int, num_tokens: int) -> float:
        return gpu_step_s(num_slots, num_tokens) * (6.0 if num_tokens > num_slots + 4 else 1.0)

    true = pair(gpu_step_s, *DRAFTS["good"])
    system = System(true, 8, None)
    system.run(3.0)
    assert sum(k > 0 for k in system.chosen[-80:]) > 40
    system.pair = replace(true, step_s=disturbed_s)
    system.run(10.0)
    assert sum(k > 0 for k in system.chosen[-80:]) < 20
    system.pair = true
    system.run(FORGET_S + 60.0)
    assert sum(k > 0 for k in system.chosen[-80:]) > 40


def test_a_slow_first_catching_up_is_not_believed_for_ever() -> None:
    true = replace(pair(gpu_step_s, *DRAFTS["good"]), draft_feed_s=0.0001)
    system = System(true, 1, None, answer_tokens=100, prompt_tokens=200)
    system.planner.source("draft", 1).feed_s.observe(0.050)
    system.run(100.0)
    assert sum(k > 0 for k in system.chosen[-400:]) > 300


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


def test_answers_that_come_in_waves_are_not_slower_for_drafts_that_do_not_pay() -> None:
    true = pair(cpu_step_s, 0.5, noise=0.03)
    plain = System(true, 8, 0, seed=1, answer_tokens=48).run(60.0)
    planned = System(true, 8, None, seed=1, answer_tokens=48)
    planned.run(20.0)
    assert planned.run(60.0) >= 0.97 * plain


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
