"""How many rows a step is worth, and whose: where callers share it, too."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.row_budget import ALONE_EVERY
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import AUTO, Speculation
from target_service.drafting.budget import PROBE_STEPS, VerifyBudget, VerifyDemand
from target_service.leases.hold import PendingDraft, hold_until
from target_service.leases.lease import Lease, SlotDraftWorker
from tests.unit.target_service.drafting.steps import budget, counts, demand, lease, pending


def has_extra(made: VerifyBudget, demands: list[VerifyDemand], max_rows: int = 256) -> list[bool]:
    return [share[1] for share in made.choose(demands, max_rows, max_rows, ()) if share is not None]


class TestChoice:
    def test_rows_go_to_whose_draft_tokens_are_likeliest(self) -> None:
        assert counts(budget(), [demand([0.02, 0.01]), demand([0.9, 0.8, 0.7])]) == [0, 3]

    def test_a_fixed_number_is_verified_while_the_step_has_rows(self) -> None:
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


def with_extra(num_draft_tokens: int, num_rows: int, share: float, **values: Any) -> VerifyDemand:
    """Of a slot whose extra rows bring chains of three, each of which comes with the chance `share`."""
    gain = share + share**2 + share**3
    extra: dict[str, Any] = {"extra_rows": num_rows, "extra_gain": gain, "extra_cost_rows": num_rows + num_draft_tokens}
    return demand([share] * num_draft_tokens, **extra, **values)


class TestExtraRows:
    """At a cost of a step that is nearly the same up to 12 rows, and three times as much for 30."""

    def test_they_are_fed_where_their_drafts_pay(self) -> None:
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

    def test_a_request_with_a_fixed_number_gets_it_while_the_step_has_rows(self) -> None:
        named = with_extra(3, 29, 0.01, is_fixed=True)
        assert has_extra(budget(), [named, named], 32) == [True, False]

    def test_now_and_then_none_is_fed_so_that_it_stays_known_what_a_step_takes_without(self) -> None:
        made, fed = budget(), list[bool]()
        for _ in range(2 * PROBE_STEPS):
            fed += has_extra(made, [with_extra(0, 8, 0.8)])
        assert fed.count(False) == 2

    def test_before_any_measurement_one_slot_tries(self) -> None:
        assert has_extra(VerifyBudget(), [with_extra(0, 8, 0.6)] * 3) == [True, False, False]


ONE, MANY = b"one", b"many"
MOST = 256


def seconds_of(num_rows: int) -> float:
    return 0.010 + 0.001 * num_rows


def slot(
    caller: bytes, probs: list[float], num_required: int = 0, ready_s: float = 0.0, **scheduling: Any
) -> VerifyDemand:
    own = Scheduling(caller, **scheduling)
    return VerifyDemand(probs, num_required, num_required, is_fixed=bool(num_required), scheduling=own, ready_s=ready_s)


def tree(num_nodes: int) -> VerifyDemand:
    """A tree of the shape 4x2x1, of which so many nodes are there."""
    probs = [0.5, 0.25, 0.125]
    return VerifyDemand(probs, num_nodes, 20, is_whole=True, is_fixed=True, scheduling=Scheduling(MANY))


def settled(*found: VerifyDemand, num_steps: int = 250) -> tuple[VerifyBudget, list[list[int | None]]]:
    """Take steps in which the same lies ready, and slots of which have turns; return what the last hundred fed."""
    budget, demands = VerifyBudget(), list(found)
    for num_rows in (1, 2, 4, 8, 16, 64, 300, 3000):
        budget.cost.note(num_rows, seconds_of(num_rows))
    chosen = [step(budget, demands, now) for now in range(1, num_steps)]
    return budget, chosen[-100:]


def step(budget: VerifyBudget, demands: list[VerifyDemand], now: float) -> list[int | None]:
    shares = budget.choose(demands, MOST, MOST, [each.scheduling for each in demands])
    num_rows = 0
    for index, share in enumerate(shares):
        if share is not None:
            demands[index] = replace(demands[index], ready_s=now)
            num_rows += demands[index].part(share[0])[2]
    budget.note(num_rows, num_rows, seconds_of(num_rows))
    return [None if share is None else share[0] for share in shares]


def rows_of(chosen: list[list[int | None]]) -> list[int]:
    """Return the rows of each slot over some steps."""
    return [sum(1 + count for count in own if count is not None) for own in zip(*chosen, strict=True)]


def many(count: int, **how: Any) -> list[VerifyDemand]:
    return [slot(MANY, [0.7**depth for depth in range(1, 33)], **how) for _ in range(count)]


def test_drafts_are_left_out_before_slots_and_slots_alternate() -> None:
    lone = slot(ONE, [0.8, 0.6])
    for num_slots, all_run in ((6, True), (40, False)):
        _, chosen = settled(lone, *many(num_slots, num_required=32))
        rows = rows_of(chosen)
        assert all(counts[0] is not None for counts in chosen)
        runs = [sum(each is not None for each in own) for own in zip(*chosen, strict=True)][1:]
        assert min(runs) > 0.6 * max(runs)
        if all_run:
            assert min(runs) >= 99 - 100 / ALONE_EVERY and sum(rows[1:]) > 600, "what is left of their part are drafts"
        else:
            assert sum(rows[1:]) == sum(runs), "not one draft where slots wait"
        assert all(seconds_of(sum(1 + c for c in counts if c is not None)) < 2.5 * seconds_of(3) for counts in chosen)


def test_alone_a_caller_gets_its_fixed_number_and_all_without_a_key_are_one() -> None:
    for caller in (b"", MANY):
        _, chosen = settled(*[slot(caller, [0.9] * 32, num_required=32) for _ in range(5)], num_steps=120)
        assert chosen[-1] == [32] * 5


def test_a_callers_own_slots_go_by_priority_and_then_by_who_waited_longest() -> None:
    urgent = slot(MANY, [], priority=-1)
    _, chosen = settled(slot(ONE, []), urgent, *many(60))
    probes = 100 / ALONE_EVERY
    runs = [sum(each is not None for each in own) for own in zip(*chosen, strict=True)]
    assert runs[1] >= 99 - probes and max(runs[2:]) < 60


def test_what_was_drawn_decides_nothing() -> None:
    """Neither ids nor, of a tree of a named shape, how many nodes there are."""
    steps = []
    for num_nodes in (7, 12, 20):
        trees = [tree(num_nodes) for _ in range(14)]  # more than fit a step
        chosen = [*settled(*trees, num_steps=150)[1], *settled(*trees, slot(ONE, [0.8, 0.6]), num_steps=150)[1]]
        assert {count for counts in chosen for count in counts[:14]} <= {None, 0, num_nodes}, "as a whole or not at all"
        steps.append([[None if count is None else bool(count) for count in counts[:14]] for counts in chosen])
    assert steps[0] == steps[1] == steps[2]


def test_a_bounded_step_waits_for_draft_tokens_worth_it_to_the_caller_that_bounds_it() -> None:
    lone, others = slot(ONE, [0.8, 0.6]), many(40)
    budget, _ = settled(lone, *others)
    waiting = [awaited(ONE), awaited(MANY)]
    assert budget.awaited(waiting) == waiting[:1]
    assert budget.hold_until(waiting[:1], 99.0) == pytest.approx(99.01)
    assert hold_until(waiting, 99.0, 1000.0) is None, "not to all together"
    waiting[0].draft.eta_s = 0.5
    assert budget.hold_until(waiting[:1], 99.0) is None
    budget.choose(others, MOST, MOST, ())
    assert budget.awaited(waiting) == waiting


def awaited(caller: bytes) -> PendingDraft:
    """Draft tokens of a slot that is ready since 99 s, for which nothing is here."""
    own = SlotAcceptance(RankAcceptance())
    own.first = 0.5
    known: Any = SimpleNamespace(scheduling=Scheduling(caller), committed=[7], max_len=99)
    draft = SlotDraftWorker(Drafter.MODEL, own, 1, is_active=True)
    draft.starved_since_s[1], draft.eta_s = 0.0, 0.005
    lease = Lease(None, known, Speculation(AUTO, max_draft_tokens=64), [draft], {}, 99.0)  # type: ignore[arg-type]
    return PendingDraft(lease, draft, 0.8)


@pytest.mark.parametrize(("max_tpot_ms", "most_rows"), [(None, 31), (19.5, 9), (14.5, 4), (1.0, 31)])
def test_drafts_are_left_out_for_a_slot_with_a_limit_on_the_time_of_a_token(
    max_tpot_ms: float | None, most_rows: int
) -> None:
    """Where a step takes 10 ms and a row 1 ms: one of four has no drafts, the others all that there are. What no step
    keeps to is passed over, and no step is held for guesses that are left out.
    """
    budget = VerifyBudget()
    for num_rows in range(1, 33):
        budget.cost.note(num_rows, seconds_of(num_rows))
    others = [slot(ONE, [0.99**depth for depth in range(1, 10)]) for _ in range(3)]
    shares = budget.choose([slot(ONE, [], max_tpot_ms=max_tpot_ms), *others], MOST, MOST, ())
    assert 4 + sum(share[0] for share in shares if share is not None) == most_rows
    waiting = [awaited(ONE)]
    waiting[0].draft.acceptance.first = 1.0
    budget.note(1, 1000, 1000.0)
    assert (budget.hold_until(waiting, 99.0) is None) == (most_rows == 4)


def test_a_slots_own_drafts_count_for_how_long_its_token_takes() -> None:
    budget = VerifyBudget()
    for num_rows in range(1, 33):
        budget.cost.note(num_rows, seconds_of(num_rows))
    others = [slot(ONE, [0.3] * 9) for _ in range(3)]
    assert budget.choose([slot(ONE, [0.9, 0.8], max_tpot_ms=14.5), *others], MOST, MOST, ())[0] == (2, False)
