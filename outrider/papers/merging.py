"""Several drafters in one tree: what draft workers deliver, and a chain of the target's own beside it. Pure.

SpecInfer (Miao et al., ASPLOS 2024). Where draft tokens are accepted as far as they match, the drafters' trees are laid
over each other, and the budget takes nodes of the whole. Under `rejection` each draw is tested against the distribution
of its own drafter, in the order of the drafters, the target's own last. A draw that is left out for its own value, or
for that of one that is tested after it, would change the law: so the budget takes a number of each drafter's draws
before anybody looks at what was drawn. How long a chain is may follow from what it drew: a table's ends where nothing
more is known to follow, and that of a draft which is drafted for grows faster where it draws what was proposed. So a
chain of which anything is here has as many offers as it might have tokens (`candidates`), alone, too. What two drafters
drew is one node and two draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outrider.engine.speculation.candidates import CandidateTree, Offer, join
from outrider.engine.speculation.draft_tree import ROOT


def merge(trees: Sequence[CandidateTree], max_offers: int, is_fixed: bool, is_matched: bool) -> list[Offer]:
    """Return at most max_offers of what several drafters propose, in the order in which the budget takes them.

    trees: in the order of their tests; one may be empty. is_fixed: the request names how many are verified. The earlier
    drafters then keep all their offers and later ones get what is left, so that nothing learnt from other requests
    changes the tree. Otherwise the likeliest are first. is_matched: draft tokens are accepted as far as they match.
    """
    offers = _overlaid(trees) if is_matched else _in_turn(trees)
    if not is_fixed:
        offers.sort(key=lambda offer: -offer.prob)
    return offers[:max_offers]


def _in_turn(trees: Sequence[CandidateTree]) -> list[Offer]:
    """Return the draws of all, each drafter's with the probabilities that the earlier ones leave it."""
    offers = list[Offer]()
    remaining = 1.0
    for index, candidates in enumerate(trees):
        if candidates.tree.ids:
            offers += candidates.offers(index, remaining)
            remaining *= 1.0 - candidates.prob
    return offers


def _overlaid(trees: Sequence[CandidateTree]) -> list[Offer]:
    """Return the nodes of all trees laid over each other.

    Where earlier drafters propose after the same node, the probabilities of a later one are scaled by what those leave.
    A token that several propose after one node has the largest of theirs, which its descendants' are multiplied by.
    """
    merged = join(trees, _in_turn(trees))
    parents = merged.tree.parents
    factors = [0.0] * len(parents)
    """Acceptance probability of each node after its parent."""
    proposed: list[tuple[tuple[int, int], ...]] = [()] * len(parents)
    remaining = defaultdict[int, float](lambda: 1.0)
    for index, (candidates, node_of) in enumerate(zip(trees, merged.nodes, strict=True)):
        own = candidates.tree
        probs = [*own.probs, 1.0]  # the last is that of ROOT
        for own_node, node in node_of.items():
            factor = probs[own_node] / probs[own.parents[own_node]]
            factors[node] = max(factors[node], remaining[parents[node]] * factor)
            proposed[node] += ((index, own_node),)
        for parent in {parents[node] for node in node_of.values()}:
            remaining[parent] *= 1.0 - candidates.prob
    offers = list[Offer]()
    for factor, parent, nodes in zip(factors, parents, proposed, strict=True):
        above = 1.0 if parent == ROOT else offers[parent].prob
        offers.append(Offer(above * factor, nodes))
    return offers
