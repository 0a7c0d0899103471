"""What a step might verify of several drafters, and what each is worth beside the others."""

from typing import Any

from outrider.engine.speculation.candidates import CandidateTree, join
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.papers.merging import merge
from tests.enumeration import Prefix
from tests.unit.target_service.drafting.unions import chain_of

Token = tuple[int, Any]
"""A draft token, and what it was sampled from or None."""


def guesses(*ids: int) -> list[Token]:
    return [(token_id, None) for token_id in ids]


def overlaid(*trees: CandidateTree, most: int = 9) -> list[tuple[float, Prefix]]:
    """The probability and path of each node that the budget is offered, in order."""
    offers = merge(trees, most, is_fixed=False, is_matched=True)
    tree = join(trees, offers).tree
    return [(round(offer.prob, 9), tree.prefix(node)) for node, offer in enumerate(offers)]


class TestGuesses:
    def test_the_own_chain_is_worth_what_the_draft_leaves_it(self) -> None:
        tree = DraftTree()
        for parent, token_id, prob in ((ROOT, 1, 0.6), (0, 2, 0.36), (ROOT, 3, 0.2)):
            tree.add(parent, token_id, prob=prob)
        delivered, chain = CandidateTree(tree, [None] * 3, 0.6), chain_of(guesses(3, 4), 0.75)
        assert overlaid(delivered, chain) == [
            (0.6, (1,)),
            (0.36, (1, 2)),
            (0.3, (3,)),  # its own 0.2 was raised
            (0.225, (3, 4)),
        ]
        assert overlaid(delivered, chain, most=3) == [(0.6, (1,)), (0.36, (1, 2)), (0.3, (3,))]

    def test_what_follows_a_token_that_both_propose_rises_with_it(self) -> None:
        tree = DraftTree()
        for parent, token_id, prob in ((ROOT, 1, 0.2), (ROOT, 3, 0.1), (1, 4, 0.05)):
            tree.add(parent, token_id, prob=prob)
        delivered = CandidateTree(tree, [None] * 3, 0.2)
        assert overlaid(delivered, chain_of(guesses(3), 0.75)) == [(0.6, (3,)), (0.3, (3, 4)), (0.2, (1,))]

    def test_each_further_drafter_has_what_those_before_it_leave(self) -> None:
        chains = [chain_of(guesses(*ids), prob) for ids, prob in (((1, 2), 0.5), ((3,), 0.5), ((4,), 0.8))]
        assert overlaid(*chains) == [(0.5, (1,)), (0.25, (1, 2)), (0.25, (3,)), (0.2, (4,))]
