"""Draft tokens of a beam search: which deliveries hang below the live beams, and how many levels a step uses."""

from collections.abc import Sequence

import pytest

from outrider.engine.speculation.beam import BeamLevel
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, InsertedNodes, NodeKind
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.papers.beam_drafts import BeamDrafts
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.requests.speculation import Speculation

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(temperature=0.0, beams=BeamParams(2))


def search(max_len: int = 99) -> tuple[BeamTree, BeamDrafts]:
    """Two live beams, of tokens 8 and 9, below which levels of at most 8 tokens are drafted."""
    tree = BeamTree(PROMPT)
    drafts = BeamDrafts(tree, max_len, PARAMS, Speculation(3, 32))
    tree.advance([BeamLevel(((0, 8, -1.0), (0, 9, -2.0)), ())])
    return tree, drafts


def delivery(ids: Sequence[int], parents: Sequence[int], ranks: Sequence[int], root_len: int = 4) -> Delivery:
    return Delivery(1, root_len, ids, parents, ranks, [NodeKind.DETERMINISTIC] * len(ids), None)


def test_a_level_is_used_once_it_has_as_many_nodes_as_there_are_beams() -> None:
    tree, drafts = search()
    assert drafts.insert(delivery([1], [ROOT], [0])) == InsertedNodes()
    assert drafts.depth == 0
    assert drafts.insert(delivery([2], [ROOT - 1], [1])) == InsertedNodes()
    assert drafts.depth == 1
    drafts.insert(delivery([1, 3, 3], [ROOT, 0, 0], [0, 0, 1]))  # of the second level only one: 3 twice is one
    assert drafts.depth == 1
    drafts.insert(delivery([1, 4], [ROOT, 0], [0, 1]))
    assert drafts.depth == 2
    assert [tree.prefix(node) for node in drafts.chosen(4)[0]] == [(8, 1), (9, 2), (8, 1, 3), (8, 1, 4)]
    assert drafts.chosen(3) == (drafts.chosen(2)[0], 1), "one node is too few for two beams"


def test_offers_are_as_likely_as_their_level() -> None:
    _, drafts = search()
    drafts.insert(delivery([1, 2, 3, 4], [ROOT, ROOT - 1, 0, 0], [0, 1, 0, 1]))
    shares = SlotAcceptance(RankAcceptance())
    shares.first = 0.5
    assert [offer.prob for offer in drafts.budget_items(shares, 9)] == [0.25, 0.25, 0.125, 0.125]
    assert len(drafts.budget_items(shares, 3)) == 3 and drafts.budget_items(shares, -1) == []
    assert drafts.pending_prob(shares) == pytest.approx(0.5**3), "two levels are here, the third is waited for"


def test_what_comes_for_beams_that_are_gone_is_dropped_or_late() -> None:
    tree, drafts = search()
    tree.advance([BeamLevel(((0, 1, -3.0), (1, 2, -3.5)), ())])
    assert drafts.insert(delivery([1, 6], [ROOT, ROOT - 1], [0, 0])) == InsertedNodes(1, 0), "1 is decided already"
    assert drafts.insert(delivery([1], [ROOT - 2], [0])) == InsertedNodes(0, 1), "there is no third beam"
    assert drafts.insert(delivery([1], [ROOT], [0], root_len=9)) == InsertedNodes(0, 1)
    assert tree.drafts() == []


def test_no_level_is_drafted_past_the_end_of_the_output() -> None:
    """A step decides one level more than it accepts: of 6 tokens 4 are there, so that one level is of use."""
    _, drafts = search(max_len=6)
    assert drafts.max_depth == 1
    _, drafts = search(max_len=4)
    assert drafts.max_depth == 0 and drafts.pending_prob(SlotAcceptance(RankAcceptance())) is None
