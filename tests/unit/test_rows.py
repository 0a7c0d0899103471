"""How many rows a step is worth, and when it waits for a guess."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.wire.drafters import Drafter
from outrider.wire.scheduling import Scheduling
from outrider.wire.speculation import Speculation
from target_service.lease import Candidates, Delivered, Lease, Scaffold
from target_service.rows import PROBE_STEPS, Lacking, RowRule, expected_arrival

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
        assert best_count([0.99] * 30, 1.0, 1, cost) == cost.reach - 1 == 10

    def test_more_rows_never_take_less_and_untried_ones_are_worth_a_trial(self) -> None:
        cost = RowCost()
        for num_rows, seconds in ((1, 1.0), (2, 0.8), (3, 1.1)) * 40:
            cost.note(num_rows, seconds)
        one, two, three = (cost.seconds(n) or 0 for n in (1, 2, 3))
        assert one == two < three == cost.seconds(50)

    def test_a_slower_machine_is_slower_at_every_size(self) -> None:
        cost = learnt()
        before = cost.seconds(10) or 0
        for _ in range(30):
            cost.note(1, 2 * cliff(1))
        assert (cost.seconds(10) or 0) > 1.5 * before

    def test_so_many_are_best_as_make_most_tokens_a_second(self) -> None:
        cost, gains = learnt(), [0.6**depth for depth in range(1, 20)]

        def rate(count: int) -> float:
            return (1 + sum(gains[:count])) / cliff(1 + count)

        assert best_count(gains, 1.0, 1, cost) == max(range(20), key=rate)
        assert best_count([0.9] * 20, 1.0, 1, cost) == FREE_UNTIL - 1  # not past the cliff
        assert best_count([0.005] * 20, 1.0, 1, cost) == 0


def lease(now: float = 0.0, eta_s: float | None = None, gap_s: float | None = None, **speculation: Any) -> Any:
    """A slot for which nothing lies ready."""
    shares = SlotShares(RankShares())
    spec = Speculation(**{"max_draft_tokens": 32, **speculation})
    slot: Any = SimpleNamespace(committed=[7], max_len=99, scheduling=Scheduling())
    draft = Delivered(1, shares, live=True)
    draft.lacked[1], draft.eta_s, draft.gap_s = now, eta_s, gap_s
    return Lease(None, slot, spec, 9, [draft], {}, now)  # type: ignore[arg-type]


def lacking(lease: Any, chance: float) -> Lacking:
    return Lacking(lease, lease.first, chance)


def candidates(gains: list[float], must: int = 0) -> Candidates:
    draft: Any = None
    return Candidates(lease(), [(gain, draft, index - 1) for index, gain in enumerate(gains)], must)


def rule(tokens_per_s: float = 25.0) -> RowRule:
    made = RowRule()
    made.cost = learnt()
    for _ in range(60):
        made.note(1, 1, 1 / tokens_per_s)
    return made


class TestChoice:
    def test_rows_go_to_whose_guesses_are_likeliest(self) -> None:
        good, poor = candidates([0.9, 0.8, 0.7]), candidates([0.02, 0.01])
        assert rule().choose([poor, good], 2, 256) == [0, 3]

    def test_what_is_named_is_verified_whatever_it_costs_while_a_step_has_room_the_shortest_first(self) -> None:
        wanted = [candidates([0.1] * 32, must=32) for _ in range(48)]
        counts = rule().choose([*wanted, candidates([0.1] * 5, must=5), candidates([])], 50, 256)
        assert counts[-2:] == [5, 0] and sorted(counts[:-2]) == [0] * 41 + [32] * 7

    def test_what_promises_too_little_is_passed_over_and_nobody_waits_for_more_of_it(self) -> None:
        made, near = rule(), lease(now=0.0, eta_s=0.005)
        assert made.choose([candidates([0.05, 0.03])], 1, 256) == [0]
        assert made.hold_until([lacking(near, 0.6)], 0.001) is None
        assert made.choose([candidates([])], 1, 256) == [0]
        assert made.hold_until([lacking(near, 0.6)], 0.001) is None, "nothing new is known"
        assert made.choose([candidates([0.6, 0.3])], 1, 256) == [2]
        assert made.hold_until([lacking(near, 0.6)], 0.001) is not None


def with_scaffold(gains: list[float], num_rows: int, share: float, **speculation: Any) -> Candidates:
    """Of a slot whose scaffolds bring chains of three, each guess of which comes with the chance `share`."""
    found = candidates(gains)
    made = lease(**speculation)
    shares = SlotShares(RankShares())
    shares.first = share
    made.own_shares[Drafter.LOOKAHEAD] = shares
    scaffold = Scaffold(Drafter.LOOKAHEAD, [0] * num_rows, [-1] * num_rows, 0, width=1, depth=3)
    return replace(found, lease=made, drafter=Drafter.LOOKAHEAD, scaffold=scaffold)


class TestScaffolds:
    """At a cost of a step that is nearly the same up to 12 rows, and three times as much for 30."""

    def test_they_are_fed_where_the_drafts_that_they_bring_pay_for_them_and_for_themselves(self) -> None:
        assert with_scaffold([], 8, 0.5).scaffold.gain(  # type: ignore[union-attr]
            with_scaffold([], 8, 0.5).lease.own_shares[Drafter.LOOKAHEAD]
        ) == pytest.approx(0.875)
        assert rule().scaffolds([with_scaffold([], 8, 0.5)], 1, 256) == [True]
        assert rule().scaffolds([with_scaffold([0.5] * 3, 8, 0.5)], 1, 256) == [True]
        assert rule().scaffolds([with_scaffold([0.5] * 20, 8, 0.5)], 1, 256) == [False]
        assert rule().scaffolds([with_scaffold([], 29, 0.5)], 1, 256) == [False]
        assert rule().scaffolds([with_scaffold([], 8, 0.15)], 1, 256) == [False]

    def test_the_likeliest_come_first_and_no_more_than_pay(self) -> None:
        poor, good, none = with_scaffold([], 5, 0.4), with_scaffold([], 5, 0.8), candidates([0.9])
        assert rule().scaffolds([poor, none, good], 3, 256) == [False, False, True]
        assert rule().scaffolds([good, good, good], 3, 256) == [True, True, False]
        assert rule().scaffolds([good], 1, 4) == [False], "no room"

    def test_who_names_how_much_is_verified_has_them_while_a_step_has_room(self) -> None:
        named = with_scaffold([0.5] * 3, 29, 0.01, num_draft_tokens=3)
        assert rule().scaffolds([named, named], 2, 32) == [True, False]

    def test_now_and_then_none_is_fed_so_that_it_stays_known_what_a_step_takes_without(self) -> None:
        made, found = rule(), [with_scaffold([], 8, 0.8)]
        fed = list[bool]()
        for _ in range(2 * PROBE_STEPS):
            fed += made.scaffolds(found, 1, 256)
            made.choose(found, 9, 256)
        assert fed.count(False) == 2

    def test_before_anything_is_known_one_slot_tries(self) -> None:
        found = [with_scaffold([], 8, 0.6)] * 3
        assert RowRule().scaffolds(found, 3, 256) == [True, False, False]


class TestHold:
    def test_a_step_waits_for_a_guess_that_is_worth_more_than_the_wait_and_no_longer(self) -> None:
        near = lease(now=0.0, eta_s=0.005)
        assert rule().hold_until([lacking(near, 0.6)], 0.001) == pytest.approx(0.01)
        assert rule().hold_until([lacking(near, 0.6)], 0.02) is None  # it does not come
        assert rule().hold_until([lacking(lease(eta_s=0.05), 0.6)], 0.001) is None  # it takes too long
        assert rule(tokens_per_s=2500).hold_until([lacking(near, 0.6)], 0.001) is None  # others would wait, too
        assert rule().hold_until([lacking(lease(), 0.6)], 0.001) is None  # nobody knows when it will come

    def test_drafts_that_should_arrive_are_told_from_those_that_are_overdue_or_were_never_seen(self) -> None:
        near = lease(now=0.0, eta_s=0.005)
        assert expected_arrival(near, near.first, 0.001) == (pytest.approx(0.01), 0.005, True)
        assert expected_arrival(near, near.first, 0.02) is None
        unseen = lease()
        assert expected_arrival(unseen, unseen.first, 0.001) is None

    def test_what_follows_the_first_guess_counts_for_as_long_as_it_is_worth_its_own_wait(self) -> None:
        lone, quick, slow = (lease(now=0.0, eta_s=0.007, gap_s=gap_s) for gap_s in (None, 0.0005, 0.005))
        assert rule(100).hold_until([lacking(lone, 0.6)], 0.001) is None
        assert rule(100).hold_until([lacking(slow, 0.6)], 0.001) is None
        assert rule(100).hold_until([lacking(quick, 0.6)], 0.001) == pytest.approx(0.014)

    @pytest.mark.timeout(10)
    def test_guesses_that_come_together_are_counted_to_the_end(self) -> None:
        together = lease(now=0.0, eta_s=0.007, gap_s=0.0)
        together.first.shares.first = 1.0
        assert rule(100).hold_until([lacking(together, 1.0)], 0.001) == pytest.approx(0.014)
