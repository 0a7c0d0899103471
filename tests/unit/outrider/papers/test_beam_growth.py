"""What a draft's beams are: the best by the target's sums and its own guesses, and what it feeds to know them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.engine.speculation.beam import BeamLevel
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growth import GrowthSetup
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.open_slots import BareSlot
from outrider.papers.beam_growth import BeamGrowth
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.requests.speculation import Speculation

PROMPT = (5, 6, 7)
STOP_ID = 1
PROBS = (0.4, 0.3, 0.2, 0.1)


def growing(levels: list[BeamLevel]) -> BeamGrowth:
    """Two live beams, below which a level of four is drafted."""
    params = SamplingParams(temperature=0.0, max_tokens=97, beams=BeamParams(2))
    slot, drafter = BareSlot((1, 1), PROMPT, len(PROMPT), params), cast(Any, None)
    setup = GrowthSetup(slot, Speculation(1, 4), SlotAcceptance(RankAcceptance()), drafter, None, 96, [STOP_ID])
    tree = BeamGrowth(setup)
    tree.commit_decided(levels)
    return tree


def learn(tree: BeamGrowth, node: int, ids: Sequence[int], probs: Sequence[float]) -> None:
    """Let a node that was fed be followed by these tokens, best first."""
    distribution: Any = SimpleNamespace(node=node, state=None, best=lambda row, num: (ids, probs))
    tree.extend(distribution, ())


@pytest.mark.parametrize(("sums", "best"), [((-1.0, -9.0), [10, 11, 12, 13]), ((-1.0, -1.01), [10, 20, 11, 21])])
def test_beams_are_sorted_by_the_targets_sums_and_none_ends(sums: tuple[float, float], best: list[int]) -> None:
    tree = growing([BeamLevel(((0, 8, sums[0]), (0, 9, sums[1])), ())])
    tree.feed(ROOT)
    for first, node in zip((10, 20), tree.active, strict=True):
        tree.feed(node)
        learn(tree, node, [STOP_ID, *range(first, first + 4)], [0.9, *PROBS])
    tree.finish_step()
    assert [tree.ids[node] for node in tree.unsent] == best
    assert [tree.ranks[node] for node in tree.unsent] == [0, 1, 2, 3]


def test_lost_nodes_are_fed_again_parents_first_and_no_more_at_once_than_requested() -> None:
    levels = [BeamLevel(((0, 8, -1.0), (0, 9, -2.0)), ()), *[BeamLevel(((0, 8, -1.0), (1, 9, -2.0)), ())] * 4]
    tree = growing(levels)
    assert [node for _, node in tree.candidates(3)] == [ROOT]
    tree.feed(ROOT)
    fed, steps = [ROOT], list[int]()
    while len(fed) < 11:
        nodes = [node for _, node in tree.candidates(3)]
        for node in nodes:
            assert tree.parents[node] in fed
            tree.feed(node)
            learn(tree, node, [10, 11, 12, 13], PROBS)
            fed.append(node)
        steps.append(len(nodes))
        tree.finish_step()
        assert bool(tree.unsent) is (len(fed) == 11), "a level is drafted once all live beams are known"
    assert steps == [3, 3, 3, 1]
