"""What a slot's draft tokens cost, and how much memory a step with some of them takes."""

from dataclasses import replace

import pytest

from outrider.wire.requests.drafters import Drafter
from target_service.drafting.budget import VerifyChoice
from tests.unit.target_service.drafting.unions import GREEDY, WithRows, deliver, guesses, made


def test_the_draft_tokens_that_earlier_ones_brought_are_paid_for_with_them() -> None:
    drafting, lease = made(GREEDY, [], name=Drafter.NGRAM)
    own, nobodys = replace(drafting, own=WithRows(guesses(0, 1), Drafter.NGRAM)), WithRows([], Drafter.NGRAM)
    costs = list[int]()
    deliver(lease, [[0]])
    for each in (own, replace(drafting, own=nobodys)):
        costs.append(each.add_extra_rows(each.candidates(lease)).demand.extra_cost_rows)
    assert costs == [3, 1], "what a draft worker delivered came of none"


@pytest.mark.parametrize(("num_draft_tokens", "with_rows", "num_after"), [(0, False, 3), (1, False, 4), (2, True, 6)])
def test_a_step_leaves_in_the_cache_what_it_feeds(num_draft_tokens: int, with_rows: bool, num_after: int) -> None:
    """Three committed tokens, of which two are cached; then draft tokens, and one row beside them."""
    drafting, lease = made(GREEDY, [], name=Drafter.NGRAM)
    drafting = replace(drafting, own=WithRows(guesses(0, 1), Drafter.NGRAM))
    found = drafting.add_extra_rows(drafting.candidates(lease))
    assert found.num_after(VerifyChoice(num_draft_tokens, with_rows)) == num_after


@pytest.mark.parametrize(("named", "num_required"), [("auto", 0), (2, 2)])
def test_the_budget_may_leave_all_but_what_a_request_names(named: object, num_required: int) -> None:
    """Greedy chains of a first probability of 0.5: the first is accepted half the time, and the second a quarter."""
    drafting, lease = made(GREEDY, guesses(1, 2), (0.6, 0.5), num_draft_tokens=named)
    found = drafting.candidates(lease)
    assert found.num_expected == pytest.approx(0.5 + 0.25)
    demand = found.demand
    assert (demand.num_required, demand.max_rows, demand.is_fixed) == (num_required, num_required, named == 2)
