"""Decide from the logits of a step what is accepted in each slot. Pure: reads no state but the slots' own parameters.

On a device `decide_on_device` applies every rule once to all slots that use it. On a CPU a slot is decided at a time,
position by position, so that nothing is computed past its first rejection; what that saves of a step is said in
`host_sampling.py`. The logits of a tree are those after the last committed token and then after each of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.acceptance import Noise, OwnDraw, accept_block_one, accept_token_one
from outrider.engine.sampling.coupled import coupled_id, coupled_place
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.reported import Reported, reported
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.side_by_side import side_by_side
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree, TreeNoise, TreeWalk, accept_tree, walk_matching
from outrider.wire.params import SamplingParams
from target_service.decide_on_device import Decided, decide_on_device
from target_service.lease import Ready
from target_service.trees_on_device import accept_numbers


def decide_tree(
    ready: Ready, tree: DraftTree, state: SamplingState, host: HostLogits, raw: Tensor, start: int
) -> Decided:
    """Decide a slot whose proposal is a tree. host, raw: the step's logits [R, V]; start: the slot's first row.

    Raises NonFiniteLogits of a row on the path.
    """

    def row(node: int) -> LogitRow:
        return LogitRow(state, tree.prefix(node))

    def law(node: int) -> RowLaw:
        return host.law(_place(start, node), row(node))

    def says(node: int) -> int:
        if state.params.greedy:
            return host.best_id(_place(start, node), row(node))
        return coupled_id(law(node), state.params, len(ready.slot.committed) + tree.depth(node))

    if ready.is_walked:
        walk = walk_matching(tree, says)
    else:
        walk = accept_tree(tree, law, ready.drawn, tree_noise(ready, tree))
    return Decided(len(walk.path), walk.next_id, _tree_reported(ready, tree, raw, start, walk), walk.path)


def tree_noise(ready: Ready, tree: DraftTree) -> TreeNoise:
    """Return a tree's numbers: a draw's is that of its position and its place among what was drawn there, as in a
    chain.
    """
    (numbers,) = accept_numbers([(ready, tree)])
    return TreeNoise(numbers, own_draw(ready.slot.params, len(ready.slot.committed)))


def own_draw(params: SamplingParams, committed_len: int) -> OwnDraw:
    """Return what draws the target's own tokens of a step behind committed_len tokens."""
    return lambda place, weights, ids: coupled_place(weights, ids, params, committed_len + place)


def all_kept(ready: Ready, decided: Decided) -> bool:
    """Return whether drafts were kept up to the end of the chain, or of one branch of a tree."""
    if ready.tree is None:
        return decided.num_accepted == len(ready.draft_ids)
    return not ready.tree.children(decided.path[-1] if decided.path else ROOT)


def _tree_reported(ready: Ready, tree: DraftTree, raw: Tensor, start: int, walk: TreeWalk) -> tuple[Reported, ...]:
    num_logprobs = ready.slot.params.num_logprobs
    if num_logprobs is None:
        return ()
    rows = [_place(start, node) for node in (ROOT, *walk.path)]
    return tuple(reported(raw[rows], [*(tree.ids[node] for node in walk.path), walk.next_id], num_logprobs))


def _place(start: int, node: int) -> int:
    """Return the row of the step's logits after a node."""
    return start + 1 + node


def decide(
    ready: Sequence[Ready], states: Sequence[SamplingState], logits: Tensor, *, by_block: bool = True
) -> list[Decided]:
    """Decide each slot.

    logits: [sum(K_b + 1), V] float32, slots in order. by_block: how rejection looks at drafts without lenience; false
    is for tests alone, which compare the rule of lenience, by token, with the exact law.

    Raises NonFiniteLogits, naming a row of every slot that cannot be decided for it. Rows that nothing is decided by
    may hold anything on the host.
    """
    if not HostLogits.reads(logits):
        return decide_on_device(ready, states, logits, by_block=by_block)
    host, noise = HostLogits(logits), slots_noise(ready)
    starts = list(accumulate((len(r.draft_ids) + 1 for r in ready), initial=0))

    def decide_one(b: int) -> Decided:
        r, state, start, own = ready[b], states[b], starts[b], noise[b]
        if r.tree is not None:
            return decide_tree(r, r.tree, state, host, logits, start)
        if own is None:
            outcome = _matching(r, lambda j, guess: _says(r, state, host, start, j, guess))
        else:
            lenience = state.params.lenience
            rule = accept_block_one if by_block and lenience == 1.0 else partial(accept_token_one, lenience=lenience)
            outcome = rule(_laws(r, state, host, start), r.draft_laws or (), r.draft_ids, own)
        return Decided(*outcome, _reported(r, logits[start:], *outcome))

    return side_by_side(decide_one, range(len(ready)), logits.numel())


def _matching(ready: Ready, says: Callable[[int, int | None], int]) -> tuple[int, int]:
    """Keep drafts while they are what the target says. says(j, the draft there): the target's token after j drafts."""
    for j, token_id in enumerate(ready.draft_ids):
        own = says(j, token_id)
        if own != token_id:
            return j, own
    num_drafted = len(ready.draft_ids)
    return num_drafted, says(num_drafted, None)


def _says(ready: Ready, state: SamplingState, host: HostLogits, start: int, j: int, guess: int | None) -> int:
    """Return the target's token after j drafts: its best one (or a guess that is nearly as good, where that will do),
    or the one that the noise of its position picks.
    """
    row = _row(ready, state, j)
    if state.params.greedy:
        return host.best_id(start + j, row, guess)
    return coupled_id(host.law(start + j, row), state.params, len(ready.slot.committed) + j)


def _laws(ready: Ready, state: SamplingState, host: HostLogits, start: int) -> Callable[[int], RowLaw]:
    return lambda j: host.law(start + j, _row(ready, state, j))


def _reported(ready: Ready, raw: Tensor, num_accepted: int, next_id: int) -> tuple[Reported, ...]:
    """Return what is reported of the slot. raw: logits that begin with its own."""
    num_logprobs = ready.slot.params.num_logprobs
    if num_logprobs is None:
        return ()
    return tuple(reported(raw[: num_accepted + 1], [*ready.draft_ids[:num_accepted], next_id], num_logprobs))


def _row(ready: Ready, state: SamplingState, j: int) -> LogitRow:
    return LogitRow(state, tuple(ready.draft_ids[:j]))


def slots_noise(ready: Sequence[Ready]) -> list[Noise | None]:
    """Return the numbers of every slot whose drafts are a chain and kept by chance, all made at once; None of the
    others.
    """
    sampled = [r for r in ready if not r.is_walked and r.tree is None]
    drafted = [r for r in sampled if r.draft_ids]
    numbers: NDArray[np.float64] = np.empty(0)
    if drafted:
        numbers = host_slot_uniforms(
            [r.slot.params for r in drafted for _ in r.draft_ids],
            [len(r.slot.committed) for r in drafted for _ in r.draft_ids],
            [len(r.slot.committed) + j for r in drafted for j in range(len(r.draft_ids))],
            [Purpose.ACCEPT],
        )[0]  # [sum(K_b)]
    ends = accumulate(len(r.draft_ids) for r in sampled)
    own = (
        Noise(numbers[end - len(r.draft_ids) : end], own_draw(r.slot.params, len(r.slot.committed)))
        for r, end in zip(sampled, ends, strict=True)
    )
    return [next(own) if not r.is_walked and r.tree is None else None for r in ready]
