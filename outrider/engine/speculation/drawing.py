"""Make draft tokens from distributions: the children of a draft tree's nodes, and the chains of the target's own
drafters.

Every drafter uses it, in the draft worker and in the target. If only the best N ids of a distribution are sent, it is
cut and renormalised *before* the draw, so that the target receives the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.engine.sampling.coupled import coupled_ranked, uniforms
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.token_distribution import (
    TokenDistribution,
    Weights,
    draw_index,
    exactly_best,
    truncate_topk,
)
from outrider.engine.speculation.candidates import CandidateTree, Distribution
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.growth import Growth, NumberKey
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS, SlotAcceptance
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.speculation.growing_tree import GrowingTree

NUM_LIKELY = 64
"""Maximum number of ids of a distribution, the likeliest ones, among which recovery nodes are chosen."""

NextDistribution = Callable[[LogitRow], TokenDistribution | None]
"""Function that returns the distribution of the token after a slot's committed tokens and `LogitRow.draft_prefix`; None
if the drafter has none there. It is called along one chain: each call has one more token in the prefix."""


def grow(distributions: Sequence[NodeDistribution]) -> dict[Growth, str]:
    """For each of several nodes, add children (draft tokens) to it from the distribution of the token after it. Return
    the trees for which the model's logits were NaN or infinite, with the error message of each.
    """
    failed = dict[Growth, str]()
    trees = set[Growth]()
    for distribution, numbers in zip(distributions, _uniforms(distributions), strict=True):
        trees.add(distribution.tree)
        if distribution.tree in failed:
            continue
        try:
            distribution.tree.extend(distribution, numbers)
        except NonFiniteLogits as error:
            failed[distribution.tree] = error.message
    for tree in trees:
        if tree not in failed:
            tree.finish_step()
    return failed


def _uniforms(distributions: Sequence[NodeDistribution]) -> list[list[float]]:
    # the numbers with which the children of each node are drawn, made in one call for the time that a call takes
    counts = list[int]()
    keys = list[NumberKey]()
    for distribution in distributions:
        own = distribution.tree.number_keys(distribution.node)
        counts.append(len(own))
        keys += own
    if not keys:
        return [[]] * len(counts)
    params, starts, positions, sample_indices = zip(*keys, strict=True)
    (drawn,) = host_slot_uniforms(params, starts, positions, [NoiseStream.DRAFT], sample_indices)
    numbers: list[float] = drawn.tolist()
    uniforms_of_nodes = list[list[float]]()
    start = 0
    for count in counts:
        uniforms_of_nodes.append(numbers[start : start + count])
        start += count
    return uniforms_of_nodes


def add_children(tree: GrowingTree, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
    """Add children (draft tokens) to one node of `tree`, from the distribution of the token after it.

    Under greedy and `coupled` acceptance, the children are the likeliest ids to be accepted; `tree.plan`, the limits of
    the tree's growth, says how many. Under `rejection` one child is drawn, without replacement, for each of `numbers`;
    then come recovery nodes, if the tree has any. If the drafter is a table that knows one token only, that token
    becomes a deterministic child instead. There are no children if the drafter knows nothing that follows, or if the
    grammar cannot be followed further. Raises NonFiniteLogits if the model returned NaN or an infinity.

    numbers: uniform numbers with which children are drawn, one for each; empty if none is drawn.
    """
    node = distribution.node
    params = distribution.state.params
    row = LogitRow(distribution.state, tree.prefix(node))
    if distribution.state.failure(row.draft_prefix) is not None:
        return  # here the target ends the output
    max_ranked = tree.plan.max_ranked
    if params.greedy and distribution.best is not None:
        tree.add_ranked(node, distribution.best(row, max_ranked)[0])
        return
    token_distribution = distribution.distribution(row)
    if token_distribution is None:
        return
    if params.is_deterministic:
        tree.add_ranked(node, _best_ids(token_distribution, params, tree.committed_len + tree.depth(node), max_ranked))
    elif distribution.best is None and token_distribution.scores.size == 1:  # a table's distribution with one token
        tree.add_child(node, token_distribution.id_of(0), NodeKind.DETERMINISTIC)
    else:
        _draw(tree, distribution, token_distribution, numbers)


def _best_ids(token_distribution: TokenDistribution, params: SamplingParams, position: int, num: int) -> list[int]:
    """Return up to num ids that the target most likely chooses at a position, best first, by its own numbers there."""
    if token_distribution.scores.size == 1:  # as at temperature 0
        return [token_distribution.id_of(0)]
    return coupled_ranked(token_distribution, params, position, num)[0]


def _draw(
    tree: GrowingTree, distribution: NodeDistribution, whole: TokenDistribution, numbers: Sequence[float]
) -> None:
    # Children are drawn one after the other without replacement; then come recovery nodes for the tokens that the
    # target may draw itself.
    token_distribution = whole
    if tree.topk is not None:
        token_distribution = truncate_topk(whole, tree.topk)
    token_distribution = token_distribution.normalised()
    weights = token_distribution.weights.copy()
    for u in numbers:
        if not weights.any():
            return
        index = draw_index(weights, u)
        weights[index] = 0.0
        tree.add_child(distribution.node, token_distribution.id_of(index), NodeKind.SAMPLED, token_distribution)
    num_recovery = min(MAX_RANKS - len(numbers), int(np.count_nonzero(weights)))
    if tree.plan.has_recovery_nodes and num_recovery > 0:
        position = tree.committed_len + tree.depth(distribution.node)
        tree.add_ranked(
            distribution.node,
            _recovery_ids(distribution.state.params, position, token_distribution, weights, num_recovery),
        )


def _recovery_ids(
    params: SamplingParams, position: int, token_distribution: TokenDistribution, weights: Weights, num_recovery: int
) -> list[int]:
    """Return the ids that the target most likely draws at a position where all drawn tokens are rejected.

    Its distribution is taken for the draft's without these. The numbers order the ids and decide nothing else. The ids
    are those of `coupled_ranked`, in 40 us a drawn node instead of 50.
    """
    likely = np.flatnonzero(weights)
    if likely.size > NUM_LIKELY:
        likely = likely[exactly_best(token_distribution.scores[likely], NUM_LIKELY)]
    ids = likely
    if token_distribution.ids is not None:
        ids = token_distribution.ids[likely]
    u = uniforms(params, position, ids)
    order = np.argsort(np.log(-np.log(u)) - token_distribution.scores[likely])[
        :num_recovery
    ]  # the largest score + Gumbel first
    return ids[order].tolist()  # type: ignore[no-any-return]


def propose_chain(
    slot: Slot,
    state: SamplingState,
    acceptance: SlotAcceptance,
    max_tokens: int,
    next_distribution: NextDistribution,
    *,
    is_counted: bool = False,
) -> CandidateTree:
    """Return a chain of at most max_tokens draft tokens for a slot of the target. It ends early where
    `next_distribution` returns None.

    next_distribution: function that returns the distribution of each next token. is_counted: whether the distributions
    are counts of a table. Then a distribution with a single token makes a deterministic draft token.
    """
    params = slot.params
    tree = DraftTree()
    distributions = list[Distribution | None]()
    for depth in range(max_tokens):
        row = LogitRow(state, tuple(tree.ids))
        if state.failure(row.draft_prefix) is not None:
            break  # here the target ends the output
        try:
            token_distribution = next_distribution(row)
        except NonFiniteLogits:
            break
        if token_distribution is None:
            break
        position = len(slot.committed) + depth
        sampled_from = None
        if params.is_deterministic or (is_counted and token_distribution.scores.size == 1):
            (token_id,) = _best_ids(token_distribution, params, position, 1)
        elif depth and distributions[-1] is None:
            break  # a deterministic token is matched, and a sampled one after it would be tested by its distribution
        else:
            sampled_from = token_distribution.normalised()
            numbers = host_slot_uniforms([params], [len(slot.committed)], [position], [NoiseStream.OWN_DRAFT])
            token_id = sampled_from.draw(float(numbers[0, 0]))
        tree.add(depth - 1, token_id, prob=acceptance.chain_prob(depth + 1))
        distributions.append(sampled_from)
    max_len = 0
    if params.lenience == 1.0:
        max_len = max_tokens
    return CandidateTree(tree, distributions, acceptance.prob(0), max_len)


def propose_by_logits(
    slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int, logits: HostLogits | None
) -> CandidateTree:
    """Return a chain of at most max_tokens draft tokens. Token j is proposed by row j of `logits` [K, V], whatever the
    tokens before it are.

    The chain is empty if `logits` is None.
    """

    def next_distribution(row: LogitRow) -> TokenDistribution | None:
        depth = len(row.draft_prefix)
        if logits is None or depth >= logits.num_rows:
            return None
        return logits.distribution_if_any(depth, row)

    return propose_chain(slot, state, acceptance, max_tokens, next_distribution)
