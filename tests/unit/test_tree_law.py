"""The output law of trees of drafts, by enumeration of every draw that the real functions make.

A chooser stands in for the generator's numbers: a run is done again for each way in which its draws can come out, and
weighs what they are worth together. So drafting, keeping, replacing and following are all the product's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from draft_service import tree_growth
from draft_service.tree_growth import Growth
from outrider.engine.sampling import row_law, tree_acceptance
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.tree_acceptance import TreeNoise, accept_tree
from outrider.wire.tree_shape import TreeShape
from tests.law.table import ENUMERATED, Row, enumerated_row

TOLERANCE = 1e-12
BROKEN = 1e-3
NUM_TOKENS = 2
"""Whose joint law is compared: a round that gives fewer goes on with the target's law."""

COMPARED: list[Row] = []
"""Laws that the running test has compared, for docs/laws.md."""

Prefix = tuple[int, ...]
Law = Callable[[Prefix], RowLaw]


class Chooser:
    """Takes the draws of one run as `script` says, and in the first way where that has ended."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.ways: list[list[int]] = []
        """Of each draw, what it could be; what it was is the first."""
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        at = len(self.ways)
        ways = [way for way, weight in enumerate(weights) if weight > 0]
        if at < len(self._script):
            ways = ways[ways.index(self._script[at]) :]
        self.ways.append(ways)
        self.probability *= weights[ways[0]]
        return ways[0]

    def next_script(self) -> list[int] | None:
        """Of the next run: the last draw that could still be another is that. None after the last run."""
        ways = list(self.ways)
        while ways and len(ways[-1]) == 1:
            ways.pop()
        return [way[0] for way in ways[:-1]] + [ways[-1][1]] if ways else None


class Number(float):
    """A uniform whose value the chooser decides where it is used."""

    chooser: Chooser

    def __lt__(self, bound: float) -> bool:
        kept = min(1.0, float(bound))
        return self.chooser.choose([kept, 1.0 - kept]) == 0


def numbers(chooser: Chooser, count: int) -> list[Number]:
    made = [Number(0.5) for _ in range(count)]
    for one in made:
        one.chooser = chooser
    return made


def drawn_place(weights: np.ndarray, u: Number) -> int:
    return u.chooser.choose((weights / weights.sum()).tolist())


@pytest.fixture(autouse=True)
def every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tree_growth, tree_acceptance, row_law):
        monkeypatch.setattr(module, "draw_place", drawn_place)


def every_run(run: Callable[[Chooser], Prefix]) -> Iterator[tuple[float, Prefix]]:
    script: list[int] | None = []
    while script is not None:
        chooser = Chooser(script)
        result = run(chooser)
        yield chooser.probability, result
        script = chooser.next_script()


Grow = Callable[[Growth, Law, Chooser], None]


def grow(growth: Growth, draft: Law, chooser: Chooser) -> None:
    while not growth.done:
        laws = [draft(growth.prefix(node)) for node in growth.frontier]
        growth.draw(laws, numbers(chooser, growth.most_drawn()))


def one_round(target: Law, draft: Law, shape: TreeShape, grow: Grow, chooser: Chooser) -> Prefix:
    growth = Growth(shape)
    grow(growth, draft, chooser)
    tree, laws = growth.tree()
    assert 1 <= len(tree.ids) <= shape.most_nodes and len(laws) == len(tree.inner)
    depth = max(map(len, tree.paths))
    noise = TreeNoise(*(numbers(chooser, count) for count in (len(tree.ids), depth, depth + 1)))
    of_node = dict(zip(tree.inner, laws, strict=True))
    walk = accept_tree(tree, lambda node: target(tree.prefix(node)), of_node, noise)
    return (*(tree.ids[node] for node in walk.path), walk.next_id)


def emitted(target: Law, draft: Law, shape: TreeShape, vocab_size: int, grow: Grow = grow) -> np.ndarray:
    """[V] * NUM_TOKENS: joint law of the first tokens; also that all ways together have probability 1."""
    total = np.zeros((vocab_size,) * NUM_TOKENS)
    for weight, output in every_run(lambda chooser: one_round(target, draft, shape, grow, chooser)):
        for rest in itertools.product(range(vocab_size), repeat=max(0, NUM_TOKENS - len(output))):
            whole, share = (*output, *rest)[:NUM_TOKENS], weight
            for i in range(len(output), NUM_TOKENS):
                share *= target(whole[:i]).prob(whole[i])
            total[whole] += share
    assert total.sum() == pytest.approx(1.0, abs=TOLERANCE)
    return total


def joint(target: Law, vocab_size: int) -> np.ndarray:
    total = np.ones((vocab_size,) * NUM_TOKENS)
    for whole in itertools.product(range(vocab_size), repeat=NUM_TOKENS):
        for i, token_id in enumerate(whole):
            total[whole] *= target(whole[:i]).prob(token_id)
    return total


def error(target: Law, draft: Law, shape: str, vocab_size: int = 3, grow: Grow = grow) -> float:
    found = emitted(target, draft, TreeShape.parse(shape), vocab_size, grow)
    largest = float(np.abs(found - joint(target, vocab_size)).max())
    COMPARED.append(enumerated_row("rejection in a tree", "slot on the host", found.size, largest))
    return largest


def random_law(vocab_size: int, seed: int, only: Sequence[int] | None = None, scale: float = 1.5) -> Law:
    """Of every prefix another; over `only` these ids, as sparse laws."""
    made: dict[Prefix, RowLaw] = {}

    def law(prefix: Prefix) -> RowLaw:
        if prefix not in made:
            generator = np.random.default_rng([seed, *prefix, 99])
            scores = (scale * generator.standard_normal(vocab_size)).astype(np.float32)
            ids = None if only is None else np.array(only)
            made[prefix] = RowLaw(vocab_size, scores if ids is None else scores[ids], ids).normalised()
        return made[prefix]

    return law


TARGET, DRAFT = random_law(3, 1), random_law(3, 2)
PAIRS = {
    "random": (TARGET, DRAFT),
    "identical": (TARGET, TARGET),
    "one-hot draft": (TARGET, random_law(3, 2, [1])),
    "one-hot target": (random_law(3, 1, [2]), DRAFT),
    "disjoint": (random_law(3, 1, [0, 2]), random_law(3, 2, [1])),
    "overlapping": (random_law(3, 1, [0, 1]), random_law(3, 2, [1, 2])),
    "peaked": (random_law(3, 3, scale=8.0), random_law(3, 4, scale=8.0)),
}
SHAPES = ("1x1", "2", "3", "2x1", "1x2", "3x1", "best:3x2", "best:3x1", "best:4x2", "best:3x3")


class TestExactLaw:
    @pytest.fixture(autouse=True)
    def recorded(self, record_property: Callable[[str, object], None]) -> Iterator[None]:
        COMPARED.clear()
        yield
        for row in COMPARED:
            record_property(ENUMERATED, row)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape: str) -> None:
        assert error(TARGET, DRAFT, shape) < TOLERANCE

    @pytest.mark.parametrize("name", PAIRS)
    def test_laws(self, name: str) -> None:
        for shape in ("2x1", "best:3x2"):
            assert error(*PAIRS[name], shape) < TOLERANCE

    def test_two_of_two(self) -> None:
        """Of 2 tokens, so that all trees can be gone through."""
        assert error(random_law(2, 1), random_law(2, 2), "2x2", vocab_size=2) < TOLERANCE
        assert error(random_law(3, 1), random_law(3, 2, [0, 2]), "2x2") < TOLERANCE

    def test_four_of_four(self) -> None:
        for shape in ("4", "best:4x1"):
            assert error(random_law(4, 5), random_law(4, 6), shape, vocab_size=4) < TOLERANCE


class TestBrokenRulesFail:
    def test_siblings_taken_for_draws_with_replacement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RowLaw, "without", lambda self, token_id: self)
        pair = random_law(4, 5), random_law(4, 6)
        for shape in ("2", "3", "best:3x1"):
            assert error(*pair, shape, vocab_size=4) > BROKEN
        assert error(*pair, "1x1", vocab_size=4) < TOLERANCE  # a chain has no siblings

    def test_the_residual_forgotten_between_siblings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tree_acceptance, "residual", lambda target_probs, draft_probs: target_probs)
        assert error(TARGET, DRAFT, "2") > BROKEN

    def test_a_child_left_out_for_its_own_value(self) -> None:
        """The best of all that were drawn, as under `greedy`."""

        def choosy(growth: Growth, draft: Law, chooser: Chooser) -> None:
            grow(growth, draft, chooser)
            worst = min(range(len(growth.nodes)), key=lambda node: growth.nodes[node].path_prob)
            del growth.nodes[worst]

        assert error(TARGET, DRAFT, "2", grow=choosy) > BROKEN
        assert error(TARGET, DRAFT, "2") < TOLERANCE


def test_more_siblings_and_deeper_trees_keep_more() -> None:
    """Mean accepted length of a round, in expectation."""

    def mean(shape: str) -> float:
        runs = every_run(lambda chooser: one_round(TARGET, DRAFT, TreeShape.parse(shape), grow, chooser))
        return sum(weight * len(output) for weight, output in runs)

    assert mean("1") < mean("2") < mean("3") == pytest.approx(2.0, abs=1e-9)  # of 3 ids one is the target's
    assert mean("1x1") < mean("2x1") and mean("2") < mean("2x1")
    assert mean("1x1") < mean("best:4x2")
