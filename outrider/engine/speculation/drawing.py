"""Makes the children of nodes from what a drafter says: guesses of what the target says, or draws from laws with
guesses beside. Written once, for every drafter, in the draft worker and in the target.

A law that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from outrider.engine.sampling.coupled import coupled_ranked, uniforms
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits
from outrider.engine.sampling.row_law import RowLaw, Weights, draw_place, exactly_best, truncate_topk
from outrider.engine.speculation.drafter import NodeDistribution
from outrider.engine.speculation.growth import Growth, NumberKey
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS
from outrider.wire.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.speculation.tree import GrowingTree

NUM_LIKELY = 64
"""Ids of a law among which the target's noise looks for what it may pick: those after them have a chance of a hundredth
or less."""


def grow(distributions: Sequence[NodeDistribution]) -> dict[Growth, str]:
    """Make the children of these nodes; none where nothing is known to follow. Return the trees that cannot go on, for
    NaN or infinity in their logits, and why.
    """
    failed = dict[Growth, str]()
    for distribution, numbers in zip(distributions, _uniforms(distributions), strict=True):
        if distribution.tree in failed:
            continue
        try:
            distribution.tree.extend(distribution, numbers)
        except NonFiniteLogits as error:
            failed[distribution.tree] = error.message
    for tree in {distribution.tree for distribution in distributions}:
        if tree not in failed:
            tree.finish_step()
    return failed


def _uniforms(distributions: Sequence[NodeDistribution]) -> list[list[float]]:
    """Return the numbers that each node's children are drawn with; all at once, for what a call costs."""
    counts, keys, params = list[int](), list[NumberKey](), list[SamplingParams]()
    for distribution in distributions:
        own = distribution.tree.number_keys(distribution.node)
        counts.append(len(own))
        keys += own
        params += [distribution.state.params] * len(own)
    if not keys:
        return [[] for _ in distributions]
    starts, positions, candidates = zip(*keys, strict=True)
    (drawn,) = host_slot_uniforms(params, starts, positions, [Purpose.DRAFT], candidates).tolist()
    numbers = iter(drawn)
    return [list(islice(numbers, count)) for count in counts]


def add_children(tree: GrowingTree, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
    """Make the children of a node. numbers: for those that are drawn. Raises NonFiniteLogits."""
    node, params = distribution.node, distribution.state.params
    row = LogitRow(distribution.state, tree.prefix(node))
    if distribution.state.failure(row.draft_prefix) is not None:
        return  # here the target ends the answer
    max_ranked = tree.plan.max_ranked
    if params.greedy and distribution.best is not None:
        ids, probs = distribution.best(row, max_ranked)
        tree.add_ranked(node, list(zip(ids, probs, strict=True)))
        return
    law = distribution.law(row)
    if law is None:
        return
    if params.greedy:
        tree.add_ranked(node, [(law.id_of(0), 1.0)])
    elif params.determined:
        ids, probs = coupled_ranked(law, params, tree.committed_len + tree.depth(node), max_ranked)
        tree.add_ranked(node, list(zip(ids, probs, strict=True)))
    elif distribution.best is None and law.scores.size == 1:  # a table that has no choice guesses
        tree.add_child(node, law.id_of(0), NodeKind.GUESS)
    else:
        _draw(tree, distribution, law, numbers)


def _draw(tree: GrowingTree, distribution: NodeDistribution, whole: RowLaw, numbers: Sequence[float]) -> None:
    """Draw children, one after the other without replacement, and guess beside them what the target may draw itself."""
    law = (whole if tree.topk is None else truncate_topk(whole, tree.topk)).normalised()
    weights = law.weights.copy()
    for u in numbers:
        if not weights.any():
            return
        place = draw_place(weights, u)
        weights[place] = 0.0
        tree.add_child(distribution.node, law.id_of(place), NodeKind.LAW, law)
    num_keys = min(MAX_RANKS - len(numbers), int(np.count_nonzero(weights)))
    if tree.plan.has_keys and num_keys > 0:
        position = tree.committed_len + tree.depth(distribution.node)
        tree.add_ranked(distribution.node, _keys(distribution.state.params, position, law, weights, num_keys))


def _keys(
    params: SamplingParams, position: int, law: RowLaw, weights: Weights, num_keys: int
) -> list[tuple[int, float]]:
    """Return the ids that the target most likely draws at a position, were its law the draft's without what is drawn
    there: by the numbers that it will draw with. They order the ids of this position and decide nothing else.
    """
    likely = np.flatnonzero(weights)
    if likely.size > NUM_LIKELY:
        likely = likely[exactly_best(law.scores[likely], NUM_LIKELY)]
    ids = likely if law.ids is None else law.ids[likely]
    u = uniforms(params, position, ids)
    order = np.argsort(np.log(-np.log(u)) - law.scores[likely])[:num_keys]  # the largest score + Gumbel first
    return list(zip(ids[order].tolist(), weights[likely[order]].tolist(), strict=True))
