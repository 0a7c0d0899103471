"""What is accepted of a proposal that is a tree. Pure; called for a slot at a time, on the host.

The logits of a tree are those after the last committed token and then after each of its nodes.
"""

from __future__ import annotations

from torch import Tensor

from outrider.engine.coupled import coupled_id
from outrider.engine.draft_tree import ROOT, DraftTree
from outrider.engine.host_sampling import HostLogits
from outrider.engine.noise import Purpose
from outrider.engine.penalties import LogitRow, SamplingState
from outrider.engine.reported import Reported, reported
from outrider.engine.row_law import RowLaw
from outrider.engine.slot_noise import host_slot_uniforms
from outrider.engine.tree_acceptance import TreeNoise, Walk, accept_tree, walk_matching
from target_service.device_batch import Decided
from target_service.waiting import Ready


def decide_tree(
    ready: Ready, tree: DraftTree, state: SamplingState, host: HostLogits, raw: Tensor, start: int
) -> Decided:
    """host, raw: the step's logits [R, V]; start: the slot's first row. Raises NonFiniteLogits of a row on the path."""

    def row(node: int) -> LogitRow:
        return LogitRow(state, tree.prefix(node))

    def law(node: int) -> RowLaw:
        return host.law(_place(start, node), row(node))

    def says(node: int) -> int:
        if state.params.greedy:
            return host.best_id(_place(start, node), row(node))
        return coupled_id(law(node), state.params, len(ready.slot.committed) + tree.depth(node))

    if ready.draft_laws is None:
        walk = walk_matching(tree, says)
    else:
        laws = dict(zip(tree.inner, ready.draft_laws, strict=True))
        walk = accept_tree(tree, law, laws, tree_noise(ready, tree))
    return Decided(len(walk.path), walk.next_id, _reported(ready, tree, raw, start, walk), walk.path)


def tree_noise(ready: Ready, tree: DraftTree) -> TreeNoise:
    """A node's number is that of its position and its place among its siblings, as is a chain's, which has one."""
    params, committed_len = ready.slot.params, len(ready.slot.committed)
    depths = [len(path) for path in tree.paths]
    places = [*(depth - 1 for depth in depths), *range(max(depths) + 1)]
    ranks = [*map(tree.rank, range(len(depths))), *[0] * (max(depths) + 1)]
    accept, recover, target = host_slot_uniforms(
        [params] * len(places),
        [committed_len] * len(places),
        [committed_len + place for place in places],
        (Purpose.ACCEPT, Purpose.RECOVER, Purpose.TARGET),
        ranks,
    ).tolist()
    return TreeNoise(accept[: len(depths)], recover[len(depths) :], target[len(depths) :])


def _reported(ready: Ready, tree: DraftTree, raw: Tensor, start: int, walk: Walk) -> tuple[Reported, ...]:
    num_logprobs = ready.slot.params.num_logprobs
    if num_logprobs is None:
        return ()
    rows = [_place(start, node) for node in (ROOT, *walk.path)]
    return tuple(reported(raw[rows], [*(tree.ids[node] for node in walk.path), walk.next_id], num_logprobs))


def _place(start: int, node: int) -> int:
    """Row of the step's logits after a node."""
    return start + 1 + node
