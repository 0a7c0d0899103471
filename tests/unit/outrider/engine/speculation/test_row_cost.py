"""What rows of a step cost, learnt from what steps took."""

import pytest

from outrider.engine.speculation.row_cost import RowCost
from target_service.drafting.budget import VerifyBudget
from tests.unit.target_service.drafting.steps import FREE_UNTIL, cliff, counts, demand, learnt


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
