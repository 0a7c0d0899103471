"""The draft tokens that drafters propose for a slot's step, and the order in which the step's budget takes them. Pure.

A drafter proposes one `CandidateTree`. The budget takes or leaves each `BudgetItem`. `join` makes one draft tree of
those that it took, and `outcomes` returns afterwards which drafters' tokens were tested. Called by the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.transport.codec import Rows

EncodedDistribution = tuple[Rows, int]
"""Distribution that was delivered and is not decoded yet: (the distributions of one message, its index among them)."""
Distribution = TokenDistribution | EncodedDistribution
DrafterT = TypeVar("DrafterT")


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """Tree of the N draft tokens that one drafter proposes for one slot's step."""

    tree: DraftTree
    """Tree of the draft tokens, best first, with acceptance probabilities."""
    distributions: Sequence[Distribution | None]
    """For each node, the distribution that it was sampled from, [N]; None for a deterministic node."""
    prob: float
    """Probability that, after an accepted node, the drafter's draft token of rank 0 is accepted."""
    max_len: int = 0
    """Maximum number of tokens that a sampled chain could have had; the budget counts so many, even if the chain is
    shorter. 0 = it counts the tokens that exist, as in a tree of a requested shape."""

    def budget_items(self, index: int = 0, factor: float = 1.0) -> list[BudgetItem]:
        """Return one item for each node, in the order of the nodes. The step's budget takes the first of them.

        index: index of this tree among those of the step. factor: multiplies all acceptance probabilities.

        The length of a sampled chain may depend on its tokens, and no sampled token may influence what is verified. So
        a sampled chain has `max_len` items, as if it had its maximum length. Items after its end have no node.

            sampled chain of 2 tokens, max_len 4, probs 0.6 and 0.36, prob 0.6: 0.6, 0.36, 0.216 and 0.13 (no nodes)
        """
        budget_items = [BudgetItem(factor * prob, ((index, node),)) for node, prob in enumerate(self.tree.probs)]
        if not budget_items or self.distributions[0] is None:
            return budget_items
        prob = factor * self.tree.probs[-1]
        for _ in range(len(budget_items), self.max_len):
            prob *= self.prob
            budget_items.append(BudgetItem(prob, ()))
        return budget_items


class BudgetItem(NamedTuple):
    """What a step's budget of rows takes or leaves: a draft token to verify, or a place that only fills a sampled chain
    up to its maximum length.
    """

    prob: float
    """Probability that the token and all its ancestors are accepted."""
    nodes: tuple[tuple[int, int], ...]
    """For each drafter that proposes the token: (index of its candidate tree, node in that tree). Empty for an item
    that only fills a sampled chain up to its maximum length: it counts in the budget, and no token is verified for it.
    """


class MergedTree(NamedTuple):
    """Draft tree of the draft tokens that a step verifies, of one or several drafters."""

    tree: DraftTree
    nodes: Sequence[Mapping[int, int]]
    """nodes[i] maps the nodes of candidate tree i that are in the merged tree to their nodes there. Nodes of two
    drafters may become one."""


def join(candidates: Sequence[CandidateTree], budget_items: Sequence[BudgetItem]) -> MergedTree:
    """Return one draft tree of the draft tokens that the budget took. Among `budget_items` parents come before their
    children.

    chains [a, b] and [a, c] of two drafters: parents [-1, 0, 0], ids [a, b, c], nodes [{0: 0, 1: 1}, {0: 0, 1: 2}]
    """
    tree = DraftTree()
    nodes: list[dict[int, int]] = [{ROOT: ROOT} for _ in candidates]
    for budget_item in budget_items:
        for index, node in budget_item.nodes:
            source = candidates[index].tree
            parent = nodes[index][source.parents[node]]
            joined = tree.child(parent, source.ids[node])
            if joined is None:
                joined = tree.add(parent, source.ids[node], prob=budget_item.prob)
            nodes[index][node] = joined
    for found in nodes:
        del found[ROOT]
    return MergedTree(tree, nodes)


def outcomes(
    tree: DraftTree, ranks: Mapping[DrafterT, Mapping[int, int]], path: Sequence[int], *, is_determined: bool
) -> Iterator[tuple[DrafterT, int | None]]:
    """At ROOT and at each accepted node, yield (drafter, rank) for each drafter whose children of it were tested. rank:
    rank of the drafter's child that was accepted; None if none of its children was.

    ranks: for each drafter, in the order of the tests, its nodes of the tree with their ranks. path: the accepted
    nodes. is_determined: whether the target chose a token first, and accepted the draft token that equals it.

    A drafter is not tested at a node at which an earlier drafter's child was accepted. If is_determined, only accepted
    children of rank 0 count for this, and a drafter is not tested either if its child of rank 0 is an earlier drafter's
    child of rank 0, too.

        A proposes child 0 and B child 1, path [1]: (A, None), (B, 0). With path [0]: (A, 0) alone
    """
    for node, accepted in zip((ROOT, *path), (*path, None), strict=True):
        decisive = set[int]()  # children of earlier drafters whose acceptance ends the tests
        for drafter, own in ranks.items():
            proposed = own.keys() & tree.children(node)
            likeliest = proposed
            if is_determined:
                likeliest = {child for child in proposed if own[child] == 0}
            is_repeated = is_determined and bool(likeliest) and likeliest <= decisive
            if proposed and accepted not in decisive and not is_repeated:
                rank = None
                if accepted is not None:
                    rank = own.get(accepted)
                yield drafter, rank
            decisive |= likeliest
