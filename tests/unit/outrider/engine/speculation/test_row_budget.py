"""What a step is bounded to where one caller would slow another by more than its part."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from outrider.engine.speculation.row_budget import ALONE_EVERY, BudgetUnit, RowBudget
from outrider.engine.speculation.row_cost import RowCost

FORWARD_S, ROW_S = 0.010, 0.001


def seconds_of(num_rows: int) -> float:
    return FORWARD_S + ROW_S * num_rows


@dataclass
class Machine:
    """Steps of callers whose slots are always ready, a row and a token each."""

    num_slots: Mapping[bytes, int]
    weights: Mapping[bytes, float]
    noise: random.Random | None = None
    cost: RowCost = field(default_factory=RowCost)
    slowdown: float = 1.0
    seconds: float = 0.0
    num_tokens: Counter[bytes] = field(default_factory=Counter)
    num_of_slot: Counter[tuple[bytes, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.budget = RowBudget[tuple[bytes, int]](self.cost)
        self.order = {caller: list(range(count)) for caller, count in self.num_slots.items()}

    def step(self, gone: bytes | None = None) -> int:
        """Take a step, without those of one; return its rows."""
        weights = {caller: weight for caller, weight in self.weights.items() if caller in self.num_slots}
        counts = {caller: count for caller, count in self.num_slots.items() if caller != gone}

        def alone(caller: bytes) -> list[BudgetUnit[tuple[bytes, int]]]:
            return [BudgetUnit((caller, slot), 1.0, 1) for slot in self.order[caller]] if caller in counts else []

        dealt = self.budget.deal(weights, [(caller, count, count) for caller, count in counts.items()], alone)
        if dealt is None:
            dealt = [(caller, slot) for caller, count in counts.items() for slot in range(count)]
        seconds = seconds_of(len(dealt)) * self.slowdown
        if self.noise is not None:
            seconds *= self.noise.uniform(0.9, 1.1) * (20.0 if self.noise.random() < 0.01 else 1.0)
        self.cost.note(len(dealt), seconds)
        self.budget.note(seconds)
        self.seconds += seconds_of(len(dealt))
        for caller, slot in dealt:
            self.num_tokens[caller] += 1
            self.num_of_slot[caller, slot] += 1
            self.order[caller].remove(slot)
            self.order[caller].append(slot)
        return len(dealt)

    def run(self, num_steps: int = 600) -> None:
        for _ in range(100):
            self.step()
        self.seconds, self.num_tokens, self.num_of_slot = 0.0, Counter(), Counter()
        for _ in range(num_steps):
            self.step()

    def times_slower(self, caller: bytes) -> float:
        """Return how many times as long a token of a caller takes as it does alone."""
        alone = self.num_slots[caller] / seconds_of(self.num_slots[caller])
        return alone / (self.num_tokens[caller] / self.seconds)


ONE, MANY = b"one", b"many"


@pytest.mark.parametrize("is_noisy", [False, True])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_one_stream_beside_many_is_slowed_by_the_part_of_the_others_and_no_more(weight: float, is_noisy: bool) -> None:
    machine = Machine({ONE: 1, MANY: 64}, {ONE: 1.0, MANY: weight}, random.Random(3) if is_noisy else None)
    machine.run()
    assert (
        (0.97 - 1 / ALONE_EVERY) * (1 + weight)
        <= machine.times_slower(ONE)
        <= (1.15 if is_noisy else 1.02) * (1 + weight)
    )
    of_many = [machine.num_of_slot[MANY, slot] for slot in range(64)]
    assert max(of_many) - min(of_many) <= 2  # they take turns
    assert machine.times_slower(MANY) <= (1 + 1 / weight) * 1.1


def test_three_callers_get_equal_rows_as_far_as_they_need_some() -> None:
    machine = Machine({b"1": 1, b"9": 9, b"70": 70}, {b"1": 1.0, b"9": 1.0, b"70": 1.0})
    machine.run()
    assert all(machine.times_slower(caller) <= 3.1 for caller in machine.num_slots)
    in_common = machine.num_tokens[b"1"] * (1 - 1 / ALONE_EVERY)
    assert machine.num_tokens[b"9"] == pytest.approx(9 * in_common, rel=0.02)
    assert machine.num_tokens[b"70"] > machine.num_tokens[b"9"]


def test_nobody_is_bounded_where_each_has_its_part() -> None:
    machine = Machine({b"a": 4, b"b": 5, b"c": 6}, dict.fromkeys((b"a", b"b", b"c"), 1.0))
    machine.run(50)
    assert machine.step() == 15


def test_a_caller_that_is_back_soon_finds_no_longer_step_under_way() -> None:
    machine = Machine({ONE: 1, MANY: 64}, {ONE: 1.0, MANY: 1.0})
    machine.run()
    sizes = [machine.step(gone=ONE) for _ in range(2 * ALONE_EVERY)]
    assert max(map(seconds_of, sizes)) <= 2.2 * seconds_of(1)


def test_the_bounding_caller_runs_alone_now_and_then_and_a_slower_machine_is_seen() -> None:
    machine = Machine({ONE: 1, MANY: 64}, {ONE: 1.0, MANY: 1.0})
    machine.run()
    sizes = Counter(machine.step() for _ in range(10 * ALONE_EVERY))
    assert sizes[1] == 10
    num_rows = machine.num_tokens.total() / 600
    machine.slowdown = 3.0
    machine.run()
    assert machine.num_tokens.total() / 600 == pytest.approx(num_rows, rel=0.2)


@pytest.mark.parametrize("before", [64, 1])
def test_a_caller_whose_number_of_streams_changes_has_its_part_then(before: int) -> None:
    """Of 64 streams beside as many of another caller one is left, or of one beside them 20 are made."""
    machine = Machine({ONE: before, MANY: 64}, {ONE: 1.0, MANY: 1.0})
    for number in range(200):
        machine.step(gone=MANY if number % 10 == 0 else None)
    after = 1 if before == 64 else 20
    machine.num_slots, machine.order[ONE] = {ONE: after, MANY: 64}, list(range(after))
    machine.run()
    assert max(map(machine.times_slower, machine.num_slots)) <= 2.05


@pytest.mark.parametrize("weight", [20.0, 100.0])
@pytest.mark.parametrize("is_last", [False, True])
def test_callers_that_do_not_all_fit_a_step_alternate(weight: float, is_last: bool) -> None:
    others = [bytes([index]) for index in range(20)]
    names = [*others, ONE] if is_last else [ONE, *others]
    machine = Machine(dict.fromkeys(names, 1), dict.fromkeys(names, 1.0) | {ONE: weight})
    machine.run()
    assert machine.times_slower(ONE) <= 1.03 * (weight + 20) / weight
    of_others = [machine.num_tokens[caller] for caller in others]
    assert max(of_others) - min(of_others) <= 2


@pytest.mark.parametrize("num_others", [24, 48])
def test_a_stream_of_weight_ten_is_hardly_slowed_by_many_of_weight_one(num_others: int) -> None:
    machine = Machine({ONE: 1, MANY: num_others}, {ONE: 10.0, MANY: 1.0})
    machine.run()
    assert machine.times_slower(ONE) <= 1.15


def test_nothing_is_kept_of_callers_that_are_gone_and_nothing_learnt_of_steps_that_were_not_dealt() -> None:
    machine = Machine({ONE: 1, MANY: 64}, {ONE: 1.0, MANY: 1.0})
    while machine.step() != 1:
        pass
    machine.budget.deal({}, (), lambda caller: ())
    for _ in range(20):
        machine.budget.note(seconds_of(64))
    machine.run(20)
    assert machine.times_slower(ONE) <= 2.05
    machine.num_slots = {MANY: 64}
    machine.step()
    assert not machine.budget._alone_s
