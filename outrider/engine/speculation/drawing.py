"""Makes draft tokens from distributions: the children of a draft tree's nodes, and the chains of the target's own
drafters. Written once, for every drafter, in the draft worker and in the target.

A distribution that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn
from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from outrider.engine.sampling.coupled import coupled_ranked, uniforms
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.row_law import RowLaw, Weights, draw_place, exactly_best, truncate_topk
from outrider.engine.speculation.candidates import CandidateTree, Distribution
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.drafter import NodeDistribution
from outrider.engine.speculation.growth import Growth, NumberKey
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS, SlotShares
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.speculation.tree import GrowingTree

NUM_LIKELY = 64
"""Ids of a distribution among which the target's noise looks for what it may pick: those after them have a chance of a
hundredth or less."""

NextDistribution = Callable[[LogitRow], RowLaw | None]
"""Returns the distribution after a row's draft prefix, each one token longer than the one before; None for nothing."""


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
    counts, keys = list[int](), list[NumberKey]()
    for distribution in distributions:
        own = distribution.tree.number_keys(distribution.node)
        counts.append(len(own))
        keys += own
    if not keys:
        return [[]] * len(counts)
    params, starts, positions, candidates = zip(*keys, strict=True)
    numbers = iter(host_slot_uniforms(params, starts, positions, [Purpose.DRAFT], candidates)[0].tolist())
    return [list(islice(numbers, count)) for count in counts]


def add_children(tree: GrowingTree, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
    """Make the children of a node. numbers: for those that are drawn. Raises NonFiniteLogits."""
    node, params = distribution.node, distribution.state.params
    row = LogitRow(distribution.state, tree.prefix(node))
    if distribution.state.failure(row.draft_prefix) is not None:
        return  # here the target ends the output
    max_ranked = tree.plan.max_ranked
    if params.greedy and distribution.best is not None:
        tree.add_ranked(node, distribution.best(row, max_ranked)[0])
        return
    law = distribution.law(row)
    if law is None:
        return
    if params.determined:
        tree.add_ranked(node, _best_ids(law, params, tree.committed_len + tree.depth(node), max_ranked))
    elif distribution.best is None and law.scores.size == 1:  # a table's without a choice
        tree.add_child(node, law.id_of(0), NodeKind.GUESS)
    else:
        _draw(tree, distribution, law, numbers)


def _best_ids(law: RowLaw, params: SamplingParams, position: int, num: int) -> list[int]:
    """Return up to `num` ids that the target most likely chooses at a position by the numbers that it will choose with,
    were its distribution this one; best first. At temperature 0 a distribution has one id.
    """
    return [law.id_of(0)] if law.scores.size == 1 else coupled_ranked(law, params, position, num)[0]


def _draw(tree: GrowingTree, distribution: NodeDistribution, whole: RowLaw, numbers: Sequence[float]) -> None:
    """Draw children, one after the other without replacement, and add keys for what the target may draw itself."""
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


def _keys(params: SamplingParams, position: int, law: RowLaw, weights: Weights, num_keys: int) -> list[int]:
    """Return the ids that the target most likely draws at a position by the numbers that it will draw with, were its
    distribution the draft's without what is drawn there. The numbers order these ids and decide nothing else.

    As `coupled_ranked` of what remains would, in 10 us less of 50 for each drawn node.
    """
    likely = np.flatnonzero(weights)
    if likely.size > NUM_LIKELY:
        likely = likely[exactly_best(law.scores[likely], NUM_LIKELY)]
    ids = likely if law.ids is None else law.ids[likely]
    u = uniforms(params, position, ids)
    order = np.argsort(np.log(-np.log(u)) - law.scores[likely])[:num_keys]  # the largest score + Gumbel first
    return ids[order].tolist()  # type: ignore[no-any-return]


def propose_chain(
    slot: Slot,
    state: SamplingState,
    shares: SlotShares,
    max_tokens: int,
    next_distribution: NextDistribution,
    *,
    is_counted: bool = False,
) -> CandidateTree:
    """Return a chain of at most max_tokens draft tokens, fewer where there is no distribution for the next.

    is_counted: distributions are a table's, of which one without a choice makes a deterministic draft token.
    """
    params = slot.params
    tree = DraftTree()
    distributions = list[Distribution | None]()
    for depth in range(max_tokens):
        row = LogitRow(state, tuple(tree.ids))
        if state.failure(row.draft_prefix) is not None:
            break  # here the target ends the output
        try:
            law = next_distribution(row)
        except NonFiniteLogits:
            break
        if law is None:
            break
        position = len(slot.committed) + depth
        sampled_from = None
        if params.determined or (is_counted and law.scores.size == 1):
            (token_id,) = _best_ids(law, params, position, 1)
        elif depth and distributions[-1] is None:
            break  # a deterministic draft token is matched, and what follows it would be tested
        else:
            sampled_from = law.normalised()
            numbers = host_slot_uniforms([params], [len(slot.committed)], [position], [Purpose.OWN_DRAFT])
            token_id = sampled_from.draw(float(numbers[0, 0]))
        tree.add(depth - 1, token_id, prob=shares.chain_prob(depth + 1))
        distributions.append(sampled_from)
    return CandidateTree(tree, distributions, shares.share(0), max_tokens if params.lenience == 1.0 else 0)


def propose_by_logits(
    slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int, logits: HostLogits | None
) -> CandidateTree:
    """Return a chain of which token j follows row j of some logits, whatever was proposed before it; an empty one
    without logits.
    """

    def next_distribution(row: LogitRow) -> RowLaw | None:
        depth = len(row.draft_prefix)
        if logits is None or depth >= logits.num_rows:
            return None
        return logits.law_if_any(depth, row)

    return propose_chain(slot, state, shares, max_tokens, next_distribution)
