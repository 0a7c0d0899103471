"""The draft tokens that drafters propose for a slot's step, and the order in which the step's budget takes them. Pure.

A drafter proposes one `CandidateTree`. The budget takes or leaves an `Offer`; `join` makes one draft tree of the offers
that it took, and `outcomes` says afterwards which drafters' tokens were tested. Called by the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.transport.codec import Rows

EncodedDistribution = tuple[Rows, int]
"""A distribution as it was delivered: (rows of a message, index among them)."""
Distribution = TokenDistribution | EncodedDistribution
Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """The draft tokens of one drafter for a slot's step: a tree of N nodes."""

    tree: DraftTree
    """Nodes best first, with acceptance probabilities."""
    distributions: Sequence[Distribution | None]
    """Distribution that each node was sampled from, [N]; None for a deterministic one."""
    prob: float
    """Acceptance probability of the drafter's first draft token after a node."""
    max_len: int = 0
    """Number of draft tokens that a sampled chain might have had; 0 for a tree of a named shape."""

    def offers(self, index: int = 0, factor: float = 1.0) -> list[BudgetOffer]:
        """Return one offer for each node, in order. index: of this tree among those of the step. factor: by which all
        acceptance probabilities are multiplied.

        The length of a sampled chain may depend on its tokens, and no sampled token may influence what is verified. So
        a sampled chain has as many offers as it might have had tokens: those behind its end have no node.

            sampled chain of 2 tokens, max_len 4, probs 0.6 and 0.36, prob 0.6: 0.6, 0.36, 0.216 and 0.13 (no nodes)
        """
        offers = [BudgetOffer(factor * prob, ((index, node),)) for node, prob in enumerate(self.tree.probs)]
        if not offers or self.distributions[0] is None:
            return offers
        prob = factor * self.tree.probs[-1]
        for _ in range(len(offers), self.max_len):
            prob *= self.prob
            offers.append(BudgetOffer(prob, ()))
        return offers


class BudgetOffer(NamedTuple):
    """One draft token that the budget takes or leaves."""

    prob: float
    """Acceptance probability."""
    nodes: tuple[tuple[int, int], ...]
    """(index of a candidate tree, node there) of each drafter that proposes it; empty behind a chain's end."""


class MergedTree(NamedTuple):
    """The draft tree of the offers that were taken."""

    tree: DraftTree
    nodes: Sequence[Mapping[int, int]]
    """For each candidate tree, the nodes of the joined tree by its own nodes. Two drafters' nodes may be one there."""


def join(candidates: Sequence[CandidateTree], offers: Sequence[BudgetOffer]) -> MergedTree:
    """Return one draft tree of the offers that were taken, which have parents before their children.

    chains [a, b] and [a, c] of two drafters: parents [-1, 0, 0], ids [a, b, c], nodes [{0: 0, 1: 1}, {0: 0, 1: 2}]
    """
    tree = DraftTree()
    nodes: list[dict[int, int]] = [{ROOT: ROOT} for _ in candidates]
    for offer in offers:
        for index, node in offer.nodes:
            source = candidates[index].tree
            parent = nodes[index][source.parents[node]]
            joined = tree.child(parent, source.ids[node])
            if joined is None:
                joined = tree.add(parent, source.ids[node], prob=offer.prob)
            nodes[index][node] = joined
    for found in nodes:
        del found[ROOT]
    return MergedTree(tree, nodes)


def outcomes(
    tree: DraftTree, ranks: Mapping[Source, Mapping[int, int]], path: Sequence[int], *, is_determined: bool
) -> Iterator[tuple[Source, int | None]]:
    """Yield (drafter, rank of its accepted child or None) for each node of the path at which a drafter was tested.

    ranks: by drafter, in the order of the tests, the ranks of its nodes of the tree. path: the accepted nodes. A
    drafter was not tested after a node where an earlier drafter had the accepted child: under `rejection` any child,
    and where draft tokens are accepted as they match (is_determined) the likeliest one.

        A proposes child 0 and B child 1, path [1]: (A, None), (B, 0). With path [0]: (A, 0) alone
    """
    for node, accepted in zip((ROOT, *path), (*path, None), strict=True):
        decisive = set[int]()  # children of earlier drafters whose acceptance ends the tests
        for source, own in ranks.items():
            proposed = own.keys() & tree.children(node)
            likeliest = proposed
            if is_determined:
                likeliest = {child for child in proposed if own[child] == 0}
            is_repeated = is_determined and bool(likeliest) and likeliest <= decisive
            if proposed and accepted not in decisive and not is_repeated:
                rank = None
                if accepted is not None:
                    rank = own.get(accepted)
                yield source, rank
            decisive |= likeliest
