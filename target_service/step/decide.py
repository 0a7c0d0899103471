"""Decide from the logits of a step what is accepted in each slot. Pure: reads no state but the slots' own parameters.

On a device `decide_on_device` computes what comes after every row at once. On a CPU a slot is decided at a time,
position by position, so that nothing is computed past its first rejection; what that saves of a step is said in
`host_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.acceptance import Noise, accept_block_one, accept_draw
from outrider.engine.sampling.coupled import coupled_id, coupled_place
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.reported import reported
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.side_by_side import side_by_side
from outrider.engine.speculation.draft_tree import ROOT
from target_service.drafting.proposal import Proposal
from target_service.step.decide_on_device import decide_on_device
from target_service.step.step_rows import Decided, StepRows, is_block, walk


def decide(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor
) -> list[Decided | NonFiniteLogits]:
    """Decide each slot; the error stands for one that cannot be decided for its logits.

    logits: [sum(K_b + 1), V] float32, slots in order. Rows that nothing is decided by may hold anything on the host.
    """
    if not HostLogits.reads(logits):
        return decide_on_device(proposals, states, logits)
    host, step = HostLogits(logits), StepRows(proposals)

    def decide_one(b: int) -> Decided:
        start = step.starts[b]
        uniforms = step.uniforms[step.draw_starts[b] : step.draw_starts[b + 1]]
        decided = _decide_slot(proposals[b], states[b], host, start, uniforms)
        num_logprobs = proposals[b].slot.params.num_logprobs
        if num_logprobs is None:
            return decided
        raw = logits[[start + 1 + node for node in (ROOT, *decided.path)]]
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
    """Decide a slot whose first row is `start`. uniforms: of its draws."""
    tree, params, committed_len = proposal.tree, state.params, len(proposal.slot.committed)

    def target_law(node: int) -> RowLaw:
        return host.law(start + 1 + node, LogitRow(state, tree.prefix(node)))

    def best_id(node: int) -> int:
        children = tree.children(node)
        draft_id = tree.ids[children[0]] if children else None  # will do with lenience, which is of chains alone
        return host.best_id(start + 1 + node, LogitRow(state, tree.prefix(node)), draft_id)

    def matching_id(node: int) -> int:
        return coupled_id(target_law(node), params, committed_len + tree.depth(node))

    if not proposal.draws:
        return walk(tree, best_id if params.greedy else matching_id)
    noise = Noise(uniforms, lambda place, weights, ids: coupled_place(weights, ids, params, committed_len + place))
    if is_block(proposal):
        distributions = [draw.distribution for draw in proposal.draws if draw.distribution is not None]
        num_accepted, next_id = accept_block_one(lambda j: target_law(j - 1), distributions, tree.ids, noise)
        return Decided(tuple(range(num_accepted)), next_id)
    return accept_by_draws(proposal, target_law, noise, params.lenience)


def accept_by_draws(
    proposal: Proposal, target_law: Callable[[int], RowLaw], noise: Noise, lenience: float = 1.0
) -> Decided:
    """Decide by recursive rejection.

    target_law(node): the target's law after a node or ROOT, asked for along one path. noise.accept: a number for each
    draw. Raises NothingToDraw.
    """
    tree = proposal.tree
    draws_after: dict[int, list[tuple[int, RowLaw | None, float]]] = {}
    for draw, u in zip(proposal.draws, noise.accept, strict=True):
        draws_after.setdefault(tree.parents[draw.node], []).append((tree.ids[draw.node], draw.distribution, u))

    def next_id(node: int) -> int:
        target = target_law(node)
        accepted_id, left = accept_draw(target, draws_after.get(node, ()), lenience)
        if accepted_id is not None:
            return accepted_id
        return target.id_of(noise.own(tree.depth(node), left, target.ids))

    return walk(tree, next_id)


def until_grammar_fails(proposal: Proposal, state: SamplingState, decided: Decided) -> Decided | None:
    """Return the decision up to where the request's grammar can be followed no further; None where it cannot be
    followed at all.
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
