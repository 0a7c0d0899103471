"""The output law of trees of drafts, by enumeration of every draw that the real functions make.

A chooser stands in for the generator's numbers: a run is done again for each way in which its draws can come out, and
weighs what they are worth together. So drafting, keeping, replacing and following are all the product's own.
"""

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher

from outrider.engine.sampling.acceptance import Noise
from outrider.engine.sampling.noise import NoiseStream
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_row
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation import drawing
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.growth import GrowthSetup
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.open_slots import BareSlot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from target_service.drafting.proposal import Proposal
from target_service.step.decide import accept_by_draws
from tests.enumeration import Chooser, Law, Numbers, Prefix, every_draw, every_run, own_draw, random_law
from tests.grammars import compiled, grammars_of
from tests.law.table import Row, enumerated_row
from tests.proposals import PlainSlot, tree_draws

__all__ = ["every_draw"]
TOLERANCE = 1e-12
NUM_TOKENS = 2
"""Whose joint law is compared: a round that gives fewer goes on with the target's law."""

COMPARED: list[Row] = []
"""Laws that the running test has compared, for docs/reports/laws.md."""
pytestmark = pytest.mark.usefixtures("every_draw")

PARAMS = SamplingParams(temperature=1.0, seed=1)
Grow = Callable[[Law, TreeShape, Numbers], GrowingTree]


def grow(draft: Law, shape: TreeShape, numbers: Numbers) -> GrowingTree:
    """Grow all that the shape names, with numbers keyed as in service: cousins are drawn with the same."""

    def keyed(
        params: Any, starts: Sequence[int], at: Sequence[int], purposes: Sequence[NoiseStream], ranks: Sequence[int]
    ) -> np.ndarray:
        (purpose,) = purposes
        return np.array([[numbers[purpose, *key] for key in zip(at, starts, ranks, strict=True)]])

    speculation = Speculation(max_draft_tokens=shape.depth, tree=shape, is_sequential=True)
    slot, drafter = (
        BareSlot((1, 1), [0], 1, PARAMS),
        cast(Any, SimpleNamespace(supports_trees=True, is_block_drafter=False, max_depth=128)),
    )
    tree = GrowingTree(GrowthSetup(slot, speculation, SlotAcceptance(RankAcceptance()), drafter, None, 96, ()))
    state = SamplingState(PARAMS, (), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "host_slot_uniforms", keyed)
        while offers := tree.candidates(1):
            node = offers[0][1]
            tree.feed(node)
            drawing.grow(
                [NodeDistribution(tree, node, state, lambda row: draft(row.draft_prefix), lambda row, num: ([], []))]
            )
    return tree


def delivered(growing: GrowingTree) -> Proposal:
    """Return the drafts, each with its draw."""
    drawn = dict[int, list[tuple[TokenDistribution, Sequence[int]]]]()
    for node in range(ROOT, len(growing)):
        children = growing.children(node)
        if children:
            drawn[node] = [(growing.distributions[children[0]], children)]
    slot: Any = PlainSlot(PARAMS, [])
    return Proposal(slot, growing, tree_draws(drawn))


def one_round(target: Law, draft: Law, shape: TreeShape, grow: Grow, chooser: Chooser) -> Prefix:
    numbers = Numbers(chooser)
    proposal = delivered(grow(draft, shape, numbers))
    assert 1 <= len(proposal.tree) <= shape.max_nodes
    return decided(target, proposal, numbers)


def decided(target: Law, proposal: Proposal, numbers: Numbers) -> Prefix:
    """Return the tokens of a step, decided draw by draw."""
    tree = proposal.tree
    noise = Noise(numbers.fresh(len(proposal.draws)), own_draw(lambda place: numbers["own", place]))  # type: ignore[arg-type]
    found = accept_by_draws(proposal, lambda node: target(tree.prefix(node)), noise)
    return (*(tree.ids[node] for node in found.path), found.next_id)


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


@pytest.mark.usefixtures("recorded")
class TestExactLaw:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape: str) -> None:
        assert error(TARGET, DRAFT, shape) < TOLERANCE

    @pytest.mark.parametrize("name", PAIRS)
    def test_distributions(self, name: str) -> None:
        for shape in ("2x1", "best:3x2"):
            assert error(*PAIRS[name], shape) < TOLERANCE

    def test_distributions_that_a_grammar_masks(self) -> None:
        """What is shipped is what was drawn from, masked by all that is said before it."""
        grammar = compiled(LLMatcher.grammar_from_regex(r"1{1,2}\]?"), grammars_of(("</s>", "1", "11", "]")))
        state = SamplingState(PARAMS, (), (0,), grammar)

        def masked(law: Law) -> Law:
            def at(prefix: Prefix) -> TokenDistribution:
                return TokenDistribution(4, process_row(law(prefix).scores, LogitRow(state, prefix)))

            return at

        for shape in ("1x1", "2x1"):
            assert error(masked(random_law(4, 1)), masked(random_law(4, 2)), shape, vocab_size=4) < TOLERANCE

    def test_two_of_two(self) -> None:
        """Of 2 tokens, so that all trees can be gone through."""
        assert error(random_law(2, 1), random_law(2, 2), "2x2", vocab_size=2) < TOLERANCE
        assert error(random_law(3, 1), random_law(3, 2, [0, 2]), "2x2") < TOLERANCE

    def test_four_of_four(self) -> None:
        for shape in ("4", "best:4x1"):
            assert error(random_law(4, 5), random_law(4, 6), shape, vocab_size=4) < TOLERANCE


def test_more_siblings_and_deeper_trees_keep_more() -> None:
    """Mean accepted length of a round, in expectation."""

    def mean(shape: str) -> float:
        runs = every_run(lambda chooser: one_round(TARGET, DRAFT, TreeShape.parse(shape), grow, chooser))
        return sum(weight * len(output) for weight, output in runs)

    assert mean("1") < mean("2") < mean("3") == pytest.approx(2.0, abs=1e-9)  # of 3 ids one is the target's
    assert mean("1x1") < mean("2x1") and mean("2") < mean("2x1")
    assert mean("1x1") < mean("best:4x2")
