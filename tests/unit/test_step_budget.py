"""Which slots of a target are in a step, and how much of each, where callers share it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from target_service.parked import ParkedNode

from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.row_budget import ALONE_EVERY
from outrider.wire.params import SamplingParams
from outrider.wire.scheduling import Scheduling
from outrider.wire.speculation import Speculation
from outrider.wire.tree_shape import TreeShape
from target_service.lease import Candidates, Delivered, Lease
from target_service.rows import Lacking, RowRule
from target_service.step_budget import StepBudget

ONE, MANY = b"one", b"many"
MOST = 256


def seconds_of(num_rows: int) -> float:
    return 0.010 + 0.001 * num_rows


def slot(
    caller: bytes,
    gains: list[float],
    must: int = 0,
    ready_s: float = 0.0,
    tree: str | None = None,
    ids: int = 0,
    **scheduling: Any,
) -> Candidates:
    """One at temperature 1 under `rejection`. ids: what was drawn, which nobody is to look at."""
    params, own = SamplingParams(temperature=1.0), SlotShares(RankShares())
    own.first = 0.5
    known: Any = SimpleNamespace(params=params, scheduling=Scheduling(caller, **scheduling), committed=[7], max_len=99)
    speculation = Speculation(max_draft_tokens=64, tree=None if tree is None else TreeShape.parse(tree))
    lease = Lease(None, known, speculation, 99, [Delivered(1, own, live=True)], {}, ready_s)  # type: ignore[arg-type]
    nodes = [(gain, ParkedNode(ids + place, kind=NodeKind.LAW), place - 1) for place, gain in enumerate(gains)]
    return Candidates(lease, nodes, must)


def settled(*found: Candidates, num_steps: int = 250) -> tuple[StepBudget, RowRule, list[list[int | None]]]:
    """Take steps in which the same lies ready, and slots of which have turns; return what the last hundred fed."""
    rule = RowRule()
    budget = StepBudget(rule)
    for num_rows in (1, 2, 4, 8, 16, 64, 300, 3000):
        rule.note(num_rows, 1, seconds_of(num_rows))
    chosen = [step(budget, rule, found, now) for now in range(1, num_steps)]
    return budget, rule, chosen[-100:]


def step(budget: StepBudget, rule: RowRule, found: Any, now: float) -> list[int | None]:
    counts = budget.choose(found, [1] * len(found), MOST, [each.lease.slot.scheduling for each in found])
    for each, count in zip(found, counts, strict=True):
        if count is not None:
            each.lease.ready_s = now
    num_rows = 0
    for each, count in zip(found, counts, strict=True):
        if count is not None:
            shape = each.lease.speculation.tree
            num_rows += 1 + (count if shape is None or not count else shape.most_nodes)
    rule.note(num_rows, num_rows, seconds_of(num_rows))
    budget.note(seconds_of(num_rows), 0.0)
    return counts


def rows_of(chosen: list[list[int | None]]) -> list[int]:
    """Return the rows of each slot over some steps."""
    return [sum(1 + count for count in own if count is not None) for own in zip(*chosen, strict=True)]


def many(count: int, **how: Any) -> list[Candidates]:
    return [slot(MANY, [0.7**depth for depth in range(1, 33)], **how) for _ in range(count)]


def test_drafts_are_left_out_before_slots_and_slots_take_turns() -> None:
    lone = slot(ONE, [0.8, 0.6])
    for num_slots, all_run in ((6, True), (40, False)):
        _, _, chosen = settled(lone, *many(num_slots, must=32))
        rows = rows_of(chosen)
        assert all(counts[0] is not None for counts in chosen)
        runs = [sum(each is not None for each in own) for own in zip(*chosen, strict=True)][1:]
        assert min(runs) > 0.6 * max(runs)
        if all_run:
            assert min(runs) >= 99 - 100 / ALONE_EVERY and sum(rows[1:]) > 600, "what is left of their part are drafts"
        else:
            assert sum(rows[1:]) == sum(runs), "not one draft where slots wait"
        assert all(seconds_of(sum(1 + c for c in counts if c is not None)) < 2.5 * seconds_of(3) for counts in chosen)


def test_alone_a_caller_gets_what_it_names_and_all_that_share_nothing_are_one() -> None:
    for caller in (b"", MANY):
        _, _, chosen = settled(*[slot(caller, [0.9] * 32, must=32) for _ in range(5)], num_steps=120)
        assert chosen[-1] == [32] * 5


def test_a_callers_own_slots_go_by_priority_and_then_by_who_waited_longest() -> None:
    urgent = slot(MANY, [], priority=-1)
    _, _, chosen = settled(slot(ONE, []), urgent, *many(60))
    probes = 100 / ALONE_EVERY
    runs = [sum(each is not None for each in own) for own in zip(*chosen, strict=True)]
    assert runs[1] >= 99 - probes and max(runs[2:]) < 60


def test_what_was_drawn_decides_nothing() -> None:
    """Neither ids nor, of a tree of a named shape, how many nodes there are."""
    shape = "4x2x1"
    steps = []
    for num_nodes, ids in ((7, 0), (12, 500), (20, 90)):
        trees = [
            slot(MANY, [0.5] * num_nodes, must=num_nodes, tree=shape, ids=ids) for _ in range(14)
        ]  # more than fit a step
        chosen = [
            counts for each in ([], [slot(ONE, [0.8, 0.6])]) for counts in settled(*trees, *each, num_steps=150)[2]
        ]
        assert {count for counts in chosen for count in counts[:14]} <= {None, 0, num_nodes}, "as a whole or not at all"
        steps.append([[None if count is None else bool(count) for count in counts[:14]] for counts in chosen])
    assert steps[0] == steps[1] == steps[2]


def test_where_steps_are_bounded_one_waits_for_guesses_that_are_worth_it_to_whom_they_are_bounded_by() -> None:
    lone, others = slot(ONE, [0.8, 0.6]), many(40)
    budget, rule, _ = settled(lone, *others)
    waiting = [Lacking(each.lease, each.lease.first, 0.8) for each in (lone, others[0])]
    for each in waiting:
        each.draft.lacked[each.lease.length], each.lease.ready_s, each.draft.eta_s = 0.0, 99.0, 0.005
    assert budget.waited_for(waiting) == waiting[:1]
    until_s = budget.hold_until(waiting[:1], 99.0)
    assert until_s is not None and until_s == pytest.approx(99.01)
    assert rule.hold_until(waiting, 99.0) is None, "not to all together"
    waiting[0].draft.eta_s = 0.5
    assert budget.hold_until(waiting[:1], 99.0) is None
    budget.choose(others, [1] * 40, MOST, ())
    assert budget.waited_for(waiting) == waiting


@pytest.mark.parametrize(("max_tpot_ms", "most_rows"), [(None, 31), (19.5, 9), (14.5, 4), (1.0, 31)])
def test_drafts_are_left_out_for_a_slot_that_says_how_long_a_token_may_take(
    max_tpot_ms: float | None, most_rows: int
) -> None:
    """Where a step takes 10 ms and a row 1 ms: one of four has no drafts, the others all that there are. What no step
    keeps to is passed over, and no step is held for guesses that are left out.
    """
    rule = RowRule()
    for num_rows in range(1, 33):
        rule.note(num_rows, 1, seconds_of(num_rows))
    others = [slot(ONE, [0.99**depth for depth in range(1, 10)]) for _ in range(3)]
    plan = rule.plan([slot(ONE, [], max_tpot_ms=max_tpot_ms), *others], 4, MOST)
    assert (4 + plan.count, plan.pays) == (most_rows, most_rows > 4)


def test_a_slots_own_drafts_count_for_how_long_its_token_takes() -> None:
    rule = RowRule()
    for num_rows in range(1, 33):
        rule.note(num_rows, 1, seconds_of(num_rows))
    others = [slot(ONE, [0.3] * 9) for _ in range(3)]
    found = [slot(ONE, [0.9, 0.8], max_tpot_ms=14.5), *others]
    assert rule.plan(found, 4, MOST).counts(rule.plan(found, 4, MOST).count)[0] == 2
