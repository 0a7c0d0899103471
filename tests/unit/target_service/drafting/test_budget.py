"""How many rows a step is worth, and when it waits for a guess."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import AUTO, Speculation
from target_service.drafting.budget import PROBE_STEPS, VerifyBudget, VerifyDemand
from target_service.leases.hold import PendingDraft, expected_arrival
from target_service.leases.lease import DeliveredDrafts, Lease

FREE_UNTIL = 12


def cliff(num_rows: int) -> float:
    """Seconds of a step of the CPU that this was measured on: rows cost little up to 12, then much."""
    return 0.04 * (1 + 0.0107 * (num_rows - 1) if num_rows <= FREE_UNTIL else 0.2 + 0.085 * num_rows)


def learnt(seconds: Any = cliff, most: int = 24) -> RowCost:
    cost = RowCost()
    for _ in range(60):
        for num_rows in range(1, most + 1):
            cost.note(num_rows, seconds(num_rows))
    return cost


class TestCost:
    def test_what_is_learnt_is_what_steps_took_and_a_cliff_stays_one(self) -> None:
        cost = learnt()
        for num_rows in (1, 4, 12, 13, 20):
            assert cost.seconds(num_rows) == pytest.approx(cliff(num_rows), rel=0.02)

    def test_between_what_was_tried_lies_a_line_and_trials_reach_twice_as_far(self) -> None:
        cost = RowCost()
        for num_rows, seconds in ((1, 1.0), (5, 3.0)) * 40:
            cost.note(num_rows, seconds)
        assert cost.seconds(3) == pytest.approx(2.0, rel=0.01)
        made = VerifyBudget()
        made.cost = cost
        assert counts(made, [demand([0.99] * 30)]) == [cost.reach - 1] == [10]

    def test_more_rows_never_take_less_and_untried_ones_are_worth_a_trial(self) -> None:
        cost = RowCost()
        for num_rows, seconds in ((1, 1.0), (2, 0.8), (3, 1.1)) * 40:
            cost.note(num_rows, seconds)
        one, two, three = (cost.seconds(n) for n in (1, 2, 3))
        assert one == two < three == cost.seconds(50)

    def test_a_slower_machine_is_slower_at_every_size(self) -> None:
        cost = learnt()
        before = cost.seconds(10)
        for _ in range(30):
            cost.note(1, 2 * cliff(1))
        assert cost.seconds(10) > 1.5 * before

    def test_so_many_are_best_as_make_most_tokens_a_second(self) -> None:
        cost, gains = learnt(), [0.6**depth for depth in range(1, 20)]

        def rate(count: int) -> float:
            return (1 + sum(gains[:count])) / cliff(1 + count)

        made = VerifyBudget()
        made.cost = cost
        assert counts(made, [demand(gains)]) == [max(range(20), key=rate)]
        assert counts(made, [demand([0.9] * 20)]) == [FREE_UNTIL - 1]  # not past the cliff
        assert counts(made, [demand([0.005] * 20)]) == [0]


def lease(now: float = 0.0, eta_s: float | None = None, gap_s: float | None = None) -> Any:
    """A slot for which nothing lies ready."""
    shares = SlotShares(RankShares())
    slot: Any = SimpleNamespace(committed=[7], max_len=99, scheduling=Scheduling())
    draft = DeliveredDrafts(Drafter.MODEL, shares, 1, is_active=True)
    draft.starved_since_s[1], draft.eta_s, draft.gap_s = now, eta_s, gap_s
    return Lease(None, slot, Speculation(AUTO, max_draft_tokens=32), [draft], {}, now)  # type: ignore[arg-type]


def pending(lease: Any, prob: float) -> PendingDraft:
    return PendingDraft(lease, lease.first, prob)


def demand(probs: list[float], num_required: int = 0, **values: Any) -> VerifyDemand:
    return VerifyDemand(probs, num_required, num_required, **values)


def budget(tokens_per_s: float = 25.0) -> VerifyBudget:
    made = VerifyBudget()
    for _ in range(60):
        made.note(1, 1, 1 / tokens_per_s)
    made.cost = learnt()
    return made


def counts(made: VerifyBudget, demands: list[VerifyDemand], max_rows: int = 256) -> list[int]:
    return [share[0] for share in made.choose(demands, max_rows, max_rows, ()) if share is not None]


def has_extra(made: VerifyBudget, demands: list[VerifyDemand], max_rows: int = 256) -> list[bool]:
    return [share[1] for share in made.choose(demands, max_rows, max_rows, ()) if share is not None]


class TestChoice:
    def test_rows_go_to_whose_draft_tokens_are_likeliest(self) -> None:
        assert counts(budget(), [demand([0.02, 0.01]), demand([0.9, 0.8, 0.7])]) == [0, 3]

    def test_what_is_named_is_verified_whatever_it_costs_while_a_step_has_room_the_shortest_first(self) -> None:
        named = [demand([0.1] * 32, 32) for _ in range(48)]
        found = counts(budget(), [*named, demand([0.1] * 5, 5), demand([])])
        assert found[-2:] == [5, 0] and sorted(found[:-2]) == [0] * 41 + [32] * 7

    def test_what_promises_too_little_is_passed_over_and_nobody_waits_for_more_of_it(self) -> None:
        made, near = budget(), lease(now=0.0, eta_s=0.005)
        assert counts(made, [demand([0.05, 0.03])]) == [0]
        assert made.hold_until([pending(near, 0.6)], 0.001) is None
        assert counts(made, [demand([])]) == [0]
        assert made.hold_until([pending(near, 0.6)], 0.001) is None, "nothing new is known"
        assert counts(made, [demand([0.6, 0.3])]) == [2]
        assert made.hold_until([pending(near, 0.6)], 0.001) is not None


def with_extra(num_drafts: int, num_rows: int, share: float, **values: Any) -> VerifyDemand:
    """Of a slot whose extra rows bring chains of three, each of which comes with the chance `share`."""
    gain = share + share**2 + share**3
    extra: dict[str, Any] = {"extra_rows": num_rows, "extra_gain": gain, "extra_cost_rows": num_rows + num_drafts}
    return demand([share] * num_drafts, **extra, **values)


class TestExtraRows:
    """At a cost of a step that is nearly the same up to 12 rows, and three times as much for 30."""

    def test_they_are_fed_where_the_drafts_that_they_bring_pay_for_them_and_for_themselves(self) -> None:
        assert has_extra(budget(), [with_extra(0, 8, 0.5)]) == [True]
        assert has_extra(budget(), [with_extra(3, 8, 0.5)]) == [True]
        assert has_extra(budget(), [with_extra(20, 8, 0.5)]) == [False]
        assert has_extra(budget(), [with_extra(0, 29, 0.5)]) == [False]
        assert has_extra(budget(), [with_extra(0, 8, 0.15)]) == [False]

    def test_the_likeliest_come_first_and_no_more_than_pay(self) -> None:
        poor, good, none = with_extra(0, 5, 0.4), with_extra(0, 5, 0.8), demand([0.9])
        assert has_extra(budget(), [poor, none, good]) == [False, False, True]
        assert has_extra(budget(), [good, good, good]) == [True, True, False]
        assert has_extra(budget(), [good], 4) == [False], "no room"

    def test_who_names_how_much_is_verified_has_them_while_a_step_has_room(self) -> None:
        named = with_extra(3, 29, 0.01, is_fixed=True)
        assert has_extra(budget(), [named, named], 32) == [True, False]

    def test_now_and_then_none_is_fed_so_that_it_stays_known_what_a_step_takes_without(self) -> None:
        made, fed = budget(), list[bool]()
        for _ in range(2 * PROBE_STEPS):
            fed += has_extra(made, [with_extra(0, 8, 0.8)])
        assert fed.count(False) == 2

    def test_before_anything_is_known_one_slot_tries(self) -> None:
        assert has_extra(VerifyBudget(), [with_extra(0, 8, 0.6)] * 3) == [True, False, False]


class TestHold:
    def test_a_step_waits_for_a_guess_that_is_worth_more_than_the_wait_and_no_longer(self) -> None:
        near = lease(now=0.0, eta_s=0.005)
        assert budget().hold_until([pending(near, 0.6)], 0.001) == pytest.approx(0.01)
        assert budget().hold_until([pending(near, 0.6)], 0.02) is None  # it does not come
        assert budget().hold_until([pending(lease(eta_s=0.05), 0.6)], 0.001) is None  # it takes too long
        assert budget(tokens_per_s=2500).hold_until([pending(near, 0.6)], 0.001) is None  # others would wait, too
        assert budget().hold_until([pending(lease(), 0.6)], 0.001) is None  # nobody knows when it will come

    def test_drafts_that_should_arrive_are_told_from_those_that_are_overdue_or_were_never_seen(self) -> None:
        near = lease(now=0.0, eta_s=0.005)
        assert expected_arrival(near, near.first, 0.001)[:3] == (pytest.approx(0.01), 0.005, True)
        assert expected_arrival(near, near.first, 0.02) is None
        unseen = lease()
        assert expected_arrival(unseen, unseen.first, 0.001) is None

    def test_what_follows_the_first_guess_counts_for_as_long_as_it_is_worth_its_own_wait(self) -> None:
        lone, quick, slow = (lease(now=0.0, eta_s=0.007, gap_s=gap_s) for gap_s in (None, 0.0005, 0.005))
        assert budget(100).hold_until([pending(lone, 0.6)], 0.001) is None
        assert budget(100).hold_until([pending(slow, 0.6)], 0.001) is None
        assert budget(100).hold_until([pending(quick, 0.6)], 0.001) == pytest.approx(0.014)

    @pytest.mark.timeout(10)
    def test_guesses_that_come_together_are_counted_to_the_end(self) -> None:
        together = lease(now=0.0, eta_s=0.007, gap_s=0.0)
        together.first.shares.first = 1.0
        assert budget(100).hold_until([pending(together, 1.0)], 0.001) == pytest.approx(0.014)
