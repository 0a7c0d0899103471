"""What `benchmarks.overlap` computes without running anything: shapes, simulated arms, and a group's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.overlap import simulation
from benchmarks.overlap.costs import Costs
from benchmarks.overlap.groups import Group
from benchmarks.overlap.results import CHAIN, PLAIN, GroupResult, Measured, Tuned, read, save
from benchmarks.overlap.shapes import Shape, best_shape
from benchmarks.overlap.traces import MAX_CHAIN, NUM_GUESSES, Traces

COSTS = Costs({1: 1.0, 2: 1.0, 64: 1.0}, {1: 0.01, 64: 0.01})


def traces_of(ranks: list[int]) -> Traces:
    """One text, of which the target's tokens are the draft's guesses of these ranks."""
    num = len(ranks)
    padded = np.array([*ranks, *[NUM_GUESSES] * (MAX_CHAIN + 1)])
    kept = np.zeros((1, num, MAX_CHAIN + 1), dtype=np.int16)
    guess = np.zeros_like(kept)
    for position in range(num):
        for length in range(MAX_CHAIN + 1):
            same = next((j for j in range(length) if padded[position + j]), length)
            kept[0, position, length], guess[0, position, length] = same, padded[position + same]
    counts = np.bincount(ranks, minlength=NUM_GUESSES + 1)[:NUM_GUESSES]
    return Traces(kept, guess, counts / num)


def test_the_likeliest_nodes_and_what_each_step_is_fed() -> None:
    shape = best_shape([0.6, 0.3, 0.01], 4, 2)
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1))
    assert shape.parents == (-1, -1, 0, 0)
    assert shape.levels == ((-1,), (0,))
    assert [shape.num_children(node) for node in (-1, 0, 1)] == [2, 2, 0]


def test_a_chain_is_as_deep_as_it_is_told() -> None:
    assert best_shape([0.9, 0.01], 4, 4).paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert best_shape([0.9, 0.5], 3, 1).paths == ((0,), (1,))


def test_taking_turns_costs_drafting_and_verifying() -> None:
    found = simulation.chain(traces_of([0, 0, 1] * 10), COSTS, 2)
    assert found.num_tokens / found.num_steps == 3.0
    assert found.seconds == pytest.approx(found.num_steps * 1.02)
    assert found.target_idle == pytest.approx(0.02 / 1.02)


def test_the_round_before_waits_for_one_and_a_half_round_trips_and_its_gateway() -> None:
    costs = replace(COSTS, round_trip_s=0.2, gateway_s=0.1)
    found = simulation.chain(traces_of([0, 0, 1] * 10), costs, 2, services=True)
    assert found.seconds / found.num_steps == pytest.approx(1.02 + 0.3 + 0.1)
    plain = simulation.chain(traces_of([0, 0, 1] * 10), costs, 0, services=True)
    assert plain.seconds / plain.num_steps == pytest.approx(1.0 + 0.2 + 0.1)


def test_a_tree_catches_what_a_chain_misses() -> None:
    found = traces_of([1, 0, 2] * 20)
    assert simulation.chain(found, COSTS, 2).num_steps > 2 * 20 - 2
    assert simulation.tree(found, COSTS, Shape(((0,), (1,), (1, 0)))).num_steps == 20


@pytest.mark.parametrize("trees", [False, True])
def test_a_cheap_draft_that_is_often_right_hides_behind_the_target(trees: bool) -> None:
    found = simulation.overlap(traces_of([0, 0, 0, 1] * 50), replace(COSTS, round_trip_s=0.1), trees=trees)
    assert found.num_tokens / found.num_steps >= 3.9
    assert found.num_hits / found.num_steps > 0.9
    assert found.target_idle < 0.02


def test_a_draft_that_is_never_right_costs_nothing() -> None:
    found = simulation.overlap(traces_of([NUM_GUESSES] * 100), COSTS, trees=False)
    assert found.tokens_per_s == pytest.approx(1.0, rel=0.02)
    assert not found.num_hits


def test_a_longer_round_trip_is_never_faster() -> None:
    found = traces_of([0, 0, 1, 0, 2, 0, 0, 0, 3, 1] * 20)
    rates = [
        simulation.overlap(found, replace(COSTS, round_trip_s=seconds), trees=True).tokens_per_s
        for seconds in (0.0, 0.1, 0.5)
    ]
    assert rates == sorted(rates, reverse=True)


def test_a_group_is_read_as_it_was_saved(tmp_path: Path) -> None:
    answers = [Measured(arm, None, 0, 0, [1, 2], 2, seconds, 2, 1, 1) for arm, seconds in ((PLAIN, 2.0), (CHAIN, 1.0))]
    tuned = Tuned(3, 2, best_shape([0.6, 0.3], 3, 2), {0.05: 4})
    result = GroupResult(Group(0.1, "greedy", 0.0), "base", 64, COSTS, tuned, {0.05: 0.001}, answers, 1)
    save(result, tmp_path / "group.json")
    assert read(tmp_path / "group.json") == result
    plain, chain = result.cell(PLAIN, None), result.cell(CHAIN, None)
    assert plain is not None and chain is not None
    assert chain.over(plain) == [[2.0]]
