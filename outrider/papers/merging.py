"""Merge several drafters' tokens into one tree: deliveries of draft workers, and a chain of the target's own. Pure.

SpecInfer (Miao et al., ASPLOS 2024). If draft tokens are accepted by matching, the drafters' trees are overlaid, and
the budget takes nodes of the merged tree.

Under `rejection` each sampled token is tested against the distribution of its own drafter, in the order of the
drafters, the target's own last. To leave out a sample because of its own value, or of the value of a sample that is
tested after it, would change the law of the output. So the budget takes a number of samples from each drafter before
their values are read. The length of a chain may depend on its samples: a table's chain ends where the table has no
continuation, and the chain of a draft model with look-ahead rows grows faster where these predict its samples. So a
chain that has any token counts with as many budget items as it could have tokens (`candidates`), even if it is the only
one. A token that two drafters sampled is one node and two samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outrider.engine.speculation.candidates import BudgetItem, CandidateTree, join
from outrider.engine.speculation.draft_tree import ROOT


def merge(trees: Sequence[CandidateTree], max_items: int, is_fixed: bool, is_matched: bool) -> list[BudgetItem]:
    """Return at most `max_items` of the drafters' draft tokens, in the order in which the step's budget takes them.

    `trees`: one for each drafter, in the order in which the drafters' tokens are tested; a tree may be empty.
    `is_fixed`: whether the request fixes the number of draft tokens. If so, tokens of earlier drafters come first and
    later drafters get what remains, so that statistics of other requests do not change the tree. If not, the likeliest
    tokens come first. `is_matched`: True = a draft token is accepted if it equals the target's token (greedy, rule
    `coupled`). False = it is tested against its drafter's distribution (rule `rejection`).

    Example: chains [a, b] and [c], `max_items` 2. If fixed, the result is a, b; otherwise the likeliest two.
    """
    if is_matched:
        budget_items = _overlaid(trees)
    else:
        budget_items = _in_turn(trees)
    if not is_fixed:
        budget_items.sort(key=lambda budget_item: -budget_item.prob)
    return budget_items[:max_items]


def _in_turn(trees: Sequence[CandidateTree]) -> list[BudgetItem]:
    budget_items = list[BudgetItem]()
    remaining = 1.0
    for index, candidates in enumerate(trees):
        if candidates.tree.ids:
            budget_items += candidates.budget_items(index, remaining)
            remaining *= 1.0 - candidates.prob
    return budget_items


def _overlaid(trees: Sequence[CandidateTree]) -> list[BudgetItem]:
    """Return the nodes of all trees, overlaid.

    If earlier drafters propose tokens after the same node, a later drafter's probabilities are multiplied by the
    probability that those are rejected. A token that several drafters propose after one node has the largest of their
    probabilities, which also multiplies those of its descendants.
    """
    merged = join(trees, _in_turn(trees))
    parents = merged.tree.parents
    factors = [0.0] * len(parents)
    """Acceptance probability of each node of the merged tree, given that its parent is accepted."""
    proposed: list[tuple[tuple[int, int], ...]] = [()] * len(parents)
    remaining = defaultdict[int, float](lambda: 1.0)
    for index, (candidates, node_of) in enumerate(zip(trees, merged.nodes, strict=True)):
        own = candidates.tree
        probs = [*own.probs, 1.0]  # the last is that of ROOT
        for own_node, node in node_of.items():
            factor = probs[own_node] / probs[own.parents[own_node]]
            factors[node] = max(factors[node], remaining[parents[node]] * factor)
            proposed[node] += ((index, own_node),)
        own_parents = set[int]()
        for node in node_of.values():
            own_parents.add(parents[node])
        for parent in own_parents:
            remaining[parent] *= 1.0 - candidates.prob
    budget_items = list[BudgetItem]()
    for factor, parent, nodes in zip(factors, parents, proposed, strict=True):
        parent_prob = 1.0
        if parent != ROOT:
            parent_prob = budget_items[parent].prob
        budget_items.append(BudgetItem(parent_prob * factor, nodes))
    return budget_items
