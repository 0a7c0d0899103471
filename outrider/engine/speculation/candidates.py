"""The draft tokens that drafters propose for a slot's step, and the order in which the step's budget takes them. Pure.

A drafter proposes one `CandidateTree`. What the budget takes or leaves is an `Offer`; `join` makes one draft tree of
the offers that were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.transport.codec import Rows

EncodedDistribution = tuple[Rows, int]
"""A distribution as it was delivered: a row of a message."""
Distribution = RowLaw | EncodedDistribution
Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """The draft tokens of one drafter for a slot's step."""

    tree: DraftTree
    """Best first, with acceptance probabilities."""
    distributions: Sequence[Distribution | None]
    """What each node was sampled from, [N]; None: it is deterministic."""
    prob: float
    """Acceptance probability of the first draft token that the drafter proposes after a node."""
    max_len: int = 0
    """Draft tokens that a chain might have had, whatever was sampled; 0 for a tree of a named shape."""

    def offers(self, index: int = 0, factor: float = 1.0) -> list[Offer]:
        """Return one offer a node, in order. index: of this tree among those of the step; factor: of all acceptance
        probabilities.

        How long a sampled chain is may follow from what was sampled, and nothing that was sampled may decide what is
        verified: so it is offered as long as it might have been, with empty offers behind its end.
        """
        found = [Offer(factor * prob, ((index, node),)) for node, prob in enumerate(self.tree.probs)]
        if not found or self.distributions[0] is None:
            return found
        prob = factor * self.tree.probs[-1]
        for _ in range(len(found), self.max_len):
            prob *= self.prob
            found.append(Offer(prob, ()))
        return found


class Offer(NamedTuple):
    """What the budget takes or leaves as one draft token."""

    prob: float
    """Acceptance probability."""
    nodes: tuple[tuple[int, int], ...]
    """Index of each candidate tree that proposes it, and its node there; none where a chain might have had it."""


class JoinedTree(NamedTuple):
    """The draft tree of the offers that were taken."""

    tree: DraftTree
    nodes: Sequence[Mapping[int, int]]
    """By candidate tree, in the order of its nodes: its node -> node of the joined tree. Two drafters' nodes may be one
    there."""


def join(candidates: Sequence[CandidateTree], offers: Sequence[Offer]) -> JoinedTree:
    """Return the tree of the first offers of a merged order, which has parents before children."""
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
    return JoinedTree(tree, nodes)


def outcomes(
    tree: DraftTree, ranks: Mapping[Source, Mapping[int, int]], path: Sequence[int], *, is_determined: bool
) -> Iterator[tuple[Source, int | None]]:
    """Yield (drafter, rank of its draft token that was accepted or None) for each node of the path at which a drafter's
    draft tokens were tested.

    ranks: by drafter, in the order of the tests, the ranks of its nodes of the tree. A drafter's were not tested where
    those of an earlier one decided: under `rejection` any of them, and where draft tokens are matched (is_determined)
    the likeliest.
    """
    for node, accepted in zip((ROOT, *path), (*path, None), strict=True):
        before = set[int]()
        for source, own in ranks.items():
            proposed = own.keys() & tree.children(node)
            likeliest = {child for child in proposed if not is_determined or own[child] == 0}
            is_repeated = is_determined and bool(likeliest) and likeliest <= before
            if proposed and accepted not in before and not is_repeated:
                yield source, None if accepted is None else own.get(accepted)
            before |= likeliest
