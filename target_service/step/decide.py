"""Decide from the logits of a step which draft tokens each slot accepts. Pure: no slot is changed.

On a device, `decide_on_device` decides all rows at once. On a CPU the slots are decided one by one, position by
position, so that nothing is computed past a slot's first rejection; `host_sampling.py` states how much time that saves.
Called by `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.acceptance import Noise, accept_block_one, accept_draw
from outrider.engine.sampling.coupled import coupled_id, coupled_index
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.reported import reported
from outrider.engine.sampling.threads import side_by_side
from outrider.engine.sampling.token_distribution import Ids, TokenDistribution, Weights
from target_service.drafting.proposal import Proposal
from target_service.step.decide_on_device import decide_on_device
from target_service.step.step_rows import Decided, StepRows, is_block, walk


def decide(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor
) -> list[Decided | NonFiniteLogits]:
    """Return the decision on each proposal, in order. If the logits of a slot are NaN or infinite, its decision is
    NonFiniteLogits.

    logits: [R, V] float32, R = sum(N_b + 1). Each slot has the row after its last committed token, then one row for
    each of the N_b nodes of its tree. On a CPU, rows after nodes that cannot be accepted are not read.

        trees of 2 and 0 nodes: rows 0, 1, 2 are the first slot's, row 3 is the second's
    """
    if not HostLogits.is_on_host(logits):
        return decide_on_device(proposals, states, logits)
    host = HostLogits(logits)
    step = StepRows(proposals)

    def decide_one(b: int) -> Decided:
        start = step.starts[b]
        uniforms = step.uniforms[step.draw_starts[b] : step.draw_starts[b + 1]]
        decided = _decide_slot(proposals[b], states[b], host, start, uniforms)
        num_logprobs = proposals[b].slot.params.num_logprobs
        if num_logprobs is None:
            return decided
        raw = logits[decided.rows(start)]  # [len(path) + 1, V]
        token_ids = [*proposals[b].tree.prefix(decided.last), decided.next_id]
        return replace(decided, reported=tuple(reported(raw, token_ids, num_logprobs)))

    return side_by_side(decide_one, range(len(proposals)), logits.numel())


def _decide_slot(
    proposal: Proposal,
    state: SamplingState,
    host: HostLogits,
    start: int,
    uniforms: NDArray[np.float64],
) -> Decided:
    tree = proposal.tree
    params = state.params
    committed_len = len(proposal.slot.committed)

    def distribution_after(node: int) -> TokenDistribution:
        return host.distribution(start + 1 + node, LogitRow(state, tree.prefix(node)))

    def greedy_id(node: int) -> int:
        draft_id = None
        children = tree.children(node)
        if children:
            draft_id = tree.ids[children[0]]  # with lenience it may do, and only chains have lenience
        return host.best_id(start + 1 + node, LogitRow(state, tree.prefix(node)), draft_id)

    def matching_id(node: int) -> int:
        return coupled_id(distribution_after(node), params, committed_len + tree.depth(node))

    def own_index(depth: int, weights: Weights, ids: Ids | None) -> int:
        return coupled_index(weights, ids, params, committed_len + depth)

    if not proposal.draws:
        return walk(tree, greedy_id if params.greedy else matching_id)
    noise = Noise(uniforms, own_index)
    if not is_block(proposal):
        return accept_by_draws(proposal, distribution_after, noise, params.lenience)
    drawn_from = list[TokenDistribution]()
    for draw in proposal.draws:
        assert draw.distribution is not None, "each draw of a chain has a distribution of its own"
        drawn_from.append(draw.distribution)
    num_accepted, next_id = accept_block_one(lambda depth: distribution_after(depth - 1), drawn_from, tree.ids, noise)
    return Decided(tuple(range(num_accepted)), next_id)


def accept_by_draws(
    proposal: Proposal, distribution_after: Callable[[int], TokenDistribution], noise: Noise, lenience: float = 1.0
) -> Decided:
    """Decide a tree by recursive rejection: SpecInfer (Miao et al., ASPLOS 2024), Algorithm 2, along one path.

    distribution_after: function that returns the target's distribution after a node or ROOT; called only for ROOT and
    accepted nodes. noise.accept: one uniform number for each of the proposal's draws. Raises EmptyDistribution if the
    distribution from which the target's own token is drawn has no positive finite mass.
    """
    tree = proposal.tree
    draws_after: dict[int, list[tuple[int, TokenDistribution | None, float]]] = {}
    for draw, u in zip(proposal.draws, noise.accept, strict=True):
        draws_after.setdefault(tree.parents[draw.node], []).append((tree.ids[draw.node], draw.distribution, u))

    def next_id(node: int) -> int:
        target = distribution_after(node)
        accepted_id, left = accept_draw(target, draws_after.get(node, ()), lenience)
        if accepted_id is not None:
            return accepted_id
        return target.id_of(noise.own(tree.depth(node), left, target.ids))

    return walk(tree, next_id)


def until_grammar_fails(proposal: Proposal, state: SamplingState, decided: Decided) -> Decided | None:
    """Return `decided`, cut after the first accepted token after which the request's grammar cannot continue. If the
    grammar can continue after all accepted tokens, return `decided` as it is. Return None if the grammar cannot
    continue after the committed tokens, so that no next token is valid.
    """
    if not state.params.grammar:
        return decided
    if state.failure(()) is not None:
        return None
    ids = proposal.tree.prefix(decided.last)
    for num_sound in range(1, len(ids) + 1):
        if state.failure(ids[:num_sound]) is not None:
            # The next step fails; the draft token that leads there stands in place of the target's own.
            return replace(decided, path=decided.path[: num_sound - 1], next_id=ids[num_sound - 1])
    return decided
